"""What ranks of the tests of `samestep comm` do: a second transport, wrong results, calls that hang or crash."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from samestep.comm import collectives, correctness, transports
from samestep.comm.collectives import Buffers
from samestep.comm_bench import run, support
from samestep.comm_bench.request import CommRequest
from samestep.comm_bench.results import Report
from samestep.comm_bench.support import try_rank

SLOWER = 0.1  # seconds that each call of the second transport takes longer: more than a busy machine adds to each


@contextmanager
def second_transport() -> Iterator[None]:
    """gloo once more, under another name, and slower."""
    table: Any = transports.TABLE
    table["slow"] = replace(transports.TABLE["gloo"], group=_slow_group)
    try:
        yield
    finally:
        del table["slow"]


def _slow_group(place: transports.TransportContext) -> dist.ProcessGroup:
    group = transports.TABLE["gloo"].group(place)
    _SLOW.add(id(group))
    return group


_SLOW: set[int] = set()


def measure_two(asked: CommRequest) -> Report | None:
    """Measure gloo beside the slower one."""
    table: Any = collectives.COLLECTIVES
    known = table["all-reduce"]

    def slower(group: dist.ProcessGroup, buffers: Buffers) -> None:
        known.run(group, buffers)
        if id(group) in _SLOW:
            time.sleep(SLOWER)

    table["all-reduce"] = replace(known, run=slower)
    with second_transport():
        return run._measure_rank(asked)


def measure_wrong(asked: CommRequest) -> Report | None:
    """Measure a broadcast of which the last rank gets something else."""
    table: Any = collectives.COLLECTIVES
    known = table["broadcast"]

    def wrong(group: dist.ProcessGroup, buffers: Buffers) -> None:
        known.run(group, buffers)
        if group.rank() == group.size() - 1:
            buffers.taken.zero_()

    table["broadcast"] = replace(known, run=wrong)
    return run._measure_rank(asked)


def try_bad(file: str, device: Any, first: int, limit: float) -> None:
    """Try a back end whose broadcast ends a rank with one dtype, and whose all-reduce hangs with the last."""
    table: Any = collectives.COLLECTIVES
    broadcast, all_reduce = table["broadcast"], table["all-reduce"]

    def crashes(group: dist.ProcessGroup, buffers: Buffers) -> None:
        if buffers.given.dtype == torch.float64 and group.rank() == 1:
            os.abort()
        broadcast.run(group, buffers)

    def hangs(group: dist.ProcessGroup, buffers: Buffers) -> None:
        if buffers.given.dtype == torch.float32 and group.rank() == 1:
            time.sleep(600)
        all_reduce.run(group, buffers)

    bad = {"broadcast": replace(broadcast, run=crashes), "all-reduce": replace(all_reduce, run=hangs)}
    table.clear()
    table.update(bad)
    dtypes: Any = (torch.float64, torch.float32)
    support.DTYPES = correctness.DTYPES = dtypes
    try_rank(file, device, first, limit)
