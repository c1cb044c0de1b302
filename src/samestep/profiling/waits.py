"""Watching messages: when a rank's thread waits for them, and when collectives run beside it."""

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch.distributed as dist

from samestep.comm.shared_memory.process_group import KernelGroup
from samestep.profiling.clock import Interval, StepClock


class MessageWatch:
    """Tells a clock of every wait, and notes when collectives of shared memory ran, in whichever thread."""

    def __init__(self, clock: StepClock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._ran: list[Interval] = []

    def waiting(self, kind: str) -> AbstractContextManager[None]:
        """Around a caller's wait for a collective."""
        return self._clock.waiting(kind)

    @contextmanager
    def running(self, kind: str) -> Iterator[None]:
        """Around a collective while it runs, in the caller's thread or another."""
        began = time.perf_counter_ns()
        try:
            yield
        finally:
            with self._lock:
                self._ran.append(Interval(name=kind, start=began, end=time.perf_counter_ns()))

    def ran(self) -> list[Interval]:
        """The collectives of shared memory that have run."""
        with self._lock:
            return list(self._ran)


@contextmanager
def watched(watch: MessageWatch) -> Iterator[None]:
    """Every process group that is there tells `watch`.

    A group of shared memory does so itself. PyTorch's groups have no such hook: while this lasts, `wait` of their
    `Work` tells. What C++ waits for by itself (the end of DistributedDataParallel's backward, `wait_tensor`) isn't
    seen here; see `StepClock.gradients_there` and `breakdown`.
    """
    groups = [group for group in dist.distributed_c10d._world.pg_map if isinstance(group, KernelGroup)]
    wait_of_pytorch = dist.Work.wait

    def wait(work: dist.Work, *arguments: Any, **keywords: Any) -> Any:
        with watch.waiting("messages"):
            return wait_of_pytorch(work, *arguments, **keywords)

    for group in groups:
        group.watcher = watch
    dist.Work.wait = wait  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        dist.Work.wait = wait_of_pytorch
        for group in groups:
            group.watcher = None
