"""StepClock: divides the time of a rank's own thread among the phases of its steps.

The trainer reports the backward of a step to it, waits for messages, and collectives that run outside the thread.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor

from samestep.comm.shared_memory.process_group import KernelGroup
from samestep.torch_internals.autograd import at_end_of_backward
from samestep.torch_internals.groups import all_groups

Phase = Literal["data", "forward", "backward", "optimizer", "other"]


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A stretch of time; nanoseconds of `time.perf_counter_ns`."""

    name: str
    start: int
    end: int


@dataclass(kw_only=True)
class PhaseTime:
    """Time of one phase in one step, in nanoseconds."""

    wall: int = 0  # without waits for messages
    processor: int = 0  # of `wall`, in which the thread ran on a processor
    waited: int = 0  # for messages


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Phases and waits of one step of one rank. The phases' `wall` and `waited` add up to `end - start`."""

    step: int
    start: int  # nanoseconds of `time.perf_counter_ns`
    end: int
    phase_times: Mapping[Phase, PhaseTime]
    phases: tuple[Interval, ...]  # in order of time, without gaps
    waits: tuple[Interval, ...]


@dataclass(kw_only=True)
class _Step:
    step: int
    start: int
    phase_times: dict[Phase, PhaseTime] = field(default_factory=dict)
    phases: list[Interval] = field(default_factory=list)
    waits: list[Interval] = field(default_factory=list)


class StepClock:
    """Tracks, during a step, which phase the thread is in, and whether it waits for messages.

    Time is attributed to the innermost phase, or to `other` outside of any. The wall clock gives the duration; the
    thread's processor clock gives how much of it the thread ran. Calls from other threads, and between steps, are
    ignored.
    """

    def __init__(self, synchronize: Callable[[], None] | None = None) -> None:
        """`synchronize` waits for an accelerator, so that its work counts for the phase that issued it."""
        self._thread = threading.get_ident()
        self._synchronize = synchronize
        self._step: _Step | None = None
        self._phases: list[Phase] = []
        self._waiting: list[str] = []
        self._ending = False  # all gradients of a backward are computed, and its final callbacks run
        self._last = self._processor = self._phase_began = self._wait_began = 0

    @property
    def runs(self) -> bool:
        """Whether a step is being measured."""
        return self._step is not None

    def begin(self, step: int) -> None:
        """A step begins."""
        self._last, self._processor = time.perf_counter_ns(), time.thread_time_ns()
        self._phase_began = self._last
        self._step = _Step(step=step, start=self._last)

    def end(self) -> StepTimes | None:
        """End the step; return its times, None if none was begun."""
        if self._step is None:
            return None
        self._note()
        self._close_phase()
        step, self._step = self._step, None
        return StepTimes(
            step=step.step,
            start=step.start,
            end=self._last,
            phase_times=step.phase_times,
            phases=tuple(step.phases),
            waits=tuple(step.waits),
        )

    @contextmanager
    def of(self, phase: Phase) -> Iterator[None]:
        """Attribute the time of a block to a phase."""
        if not self._mine():
            yield
            return
        self._enter(phase)
        try:
            yield
        finally:
            if self._synchronize is not None:
                self._synchronize()
            self._note()
            self._close_phase()
            self._ending = False
            self._phases.pop()

    def gradients_there(self) -> None:
        """Signal that backward has computed all gradients: until its phase ends, time without processor is a wait.

        DistributedDataParallel waits there for its buckets, in C++, which no hook sees. A waiting thread uses no
        processor; copies meanwhile do.
        """
        if self._mine():
            self._note()
            self._ending = True

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Attribute the time of a block to waiting for messages, or transferring them."""
        if not self._mine():
            yield
            return
        self._note()
        if not self._waiting:
            self._wait_began = self._last
        self._waiting.append(what)
        try:
            yield
        finally:
            self._note()
            name = self._waiting.pop()
            if not self._waiting and self._step is not None:
                self._step.waits.append(Interval(name=name, start=self._wait_began, end=self._last))

    def _mine(self) -> bool:
        return self._step is not None and threading.get_ident() == self._thread

    def _enter(self, phase: Phase) -> None:
        """End the interval of the current phase, and enter another one within it."""
        self._note()
        self._close_phase()
        self._phases.append(phase)

    def _phase(self) -> Phase:
        return self._phases[-1] if self._phases else "other"

    def _close_phase(self) -> None:
        if self._step is not None and self._last > self._phase_began:
            self._step.phases.append(Interval(name=self._phase(), start=self._phase_began, end=self._last))
        self._phase_began = self._last

    def _note(self) -> None:
        """Attribute the time since the last call to the current phase."""
        now, processor = time.perf_counter_ns(), time.thread_time_ns()
        wall, ran = now - self._last, processor - self._processor
        self._last, self._processor = now, processor
        if self._step is None:
            return
        phase_time = self._step.phase_times.setdefault(self._phase(), PhaseTime())
        if self._waiting:
            phase_time.waited += wall
        elif self._ending:
            ran = min(ran, wall)
            phase_time.wall += ran
            phase_time.processor += ran
            phase_time.waited += wall - ran
            if wall > ran:
                self._step.waits.append(Interval(name="gradients", start=now - (wall - ran), end=now))
        else:
            phase_time.wall += wall
            phase_time.processor += ran


def with_end_of_gradients(clock: StepClock, backward: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    """Wrap backward in a phase of its own, and signal the clock when every gradient is computed.

    Autograd runs callbacks queued during backward in order. The clock's is queued by the first node, so it runs
    before those that wait for messages.
    """

    def tell_at_end(_: Tensor) -> None:
        at_end_of_backward(clock.gradients_there)

    def run(loss: Tensor) -> None:
        """Run backward; queue the clock's callback for the end of gradient computation."""
        with clock.of("backward"):
            hook = loss.register_hook(tell_at_end) if loss.requires_grad else None
            backward(loss)
            if hook is not None:
                hook.remove()

    return run


class MessageWatch:
    """Reports every wait to a clock, and records when shared-memory collectives ran, in any thread."""

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
        """Return the intervals of shared-memory collectives."""
        with self._lock:
            return list(self._ran)


@contextmanager
def watched(watch: MessageWatch) -> Iterator[None]:
    """Make every existing process group report to `watch`.

    Shared-memory groups report themselves. PyTorch's groups have no such hook: within this context, `wait` of their
    `Work` reports. Waits inside C++ (the end of DistributedDataParallel's backward, `wait_tensor`) aren't seen here;
    see `StepClock.gradients_there` and `breakdown`.
    """
    groups = [group for group in all_groups() if isinstance(group, KernelGroup)]
    wait_of_pytorch = dist.Work.wait

    def wait(work: dist.Work, *arguments: Any, **keywords: Any) -> Any:
        """A wait for a message, counted as such."""
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
