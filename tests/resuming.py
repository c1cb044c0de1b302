"""Trainings that are saved and resumed, many in one start of ranks, which costs seconds."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import samestep
from samestep.api import _train_rank
from samestep.door import Ready
from samestep.fault_tolerance.rank import Round
from samestep.job import Job, Run
from samestep.launch import local
from samestep.launch.world import join
from samestep.layout import Layout
from samestep.training import usage

# Every job makes groups of its own, whose threads stay to the end of the process, and some hundreds of them slow it.
MOST = 25


def job_of(recipe: samestep.Recipe, layout: str, folder: Path, **run: Any) -> Job:
    return Job(recipe=recipe, run=Run(layout=layout, threads=1, folder=folder, log=(), **run))


def train_all(jobs: Sequence[Job]) -> list[samestep.TrainResult]:
    """`samestep.train` of each, in few starts of ranks: one for `MOST` jobs of a size."""
    results: dict[int, samestep.TrainResult] = {}
    sizes = [Layout.parse(job.run.layout).size for job in jobs]
    for size in dict.fromkeys(sizes):
        all_numbers = [number for number, each in enumerate(sizes) if each == size]
        for numbers in (all_numbers[at : at + MOST] for at in range(0, len(all_numbers), MOST)):
            some = [jobs[number] for number in numbers]
            found = _on_ranks(some) if size == 1 else local.start(_on_ranks, (some,), size)
            results |= dict(zip(numbers, found, strict=True))
    return [results[number] for number in range(len(jobs))]


def _on_ranks(jobs: Sequence[Job]) -> list[samestep.TrainResult]:
    # The processor's peak, which a training's speed is held against, takes longer to measure than these trainings.
    with join(threads=1), mock.patch.object(usage, "_peak", return_value=1e9):
        found = [_train_rank(Ready(job=job, layout=Layout.parse(job.run.layout)), Round()) for job in jobs]
    return [result for result in found if isinstance(result, samestep.TrainResult)]


def largest_difference(found: Sequence[float], wanted: Sequence[float]) -> float:
    """The largest relative difference of losses."""
    return max(abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True))
