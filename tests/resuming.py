"""Trainings that are saved and resumed, many in one start of ranks, which costs seconds."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import samestep
from samestep.cluster.start import local
from samestep.cluster.world import join
from samestep.job import Job, Run
from samestep.layout import Layout
from samestep.tasks.resolve import resolve
from samestep.training.fit import fit


def job_of(recipe: samestep.Recipe, layout: str, folder: Path, **run: Any) -> Job:
    return Job(recipe=recipe, run=Run(layout=layout, threads=1, folder=folder, tensorboard=False, **run))


def train_all(jobs: Sequence[Job]) -> list[samestep.TrainResult]:
    """`samestep.train` of each, in one start of ranks for those of a size."""
    results: dict[int, samestep.TrainResult] = {}
    sizes = [Layout.parse(job.run.layout).size for job in jobs]
    for size in dict.fromkeys(sizes):
        numbers = [number for number, each in enumerate(sizes) if each == size]
        some = [jobs[number] for number in numbers]
        found = _on_ranks(some) if size == 1 else local.start(_on_ranks, (some,), size)
        results |= dict(zip(numbers, found, strict=True))
    return [results[number] for number in range(len(jobs))]


def _on_ranks(jobs: Sequence[Job]) -> list[samestep.TrainResult]:
    with join(threads=1) as world:
        return [fit(job, resolve(replace(job.recipe)), world, Layout.parse(job.run.layout)) for job in jobs]


def largest_difference(found: Sequence[float], wanted: Sequence[float]) -> float:
    """The largest relative difference of losses."""
    return max(abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True))
