"""`samestep.train` and `samestep.verify`: check a job, start its ranks, bring back what they found."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from samestep import environment
from samestep.cluster.device import accelerators, check_devices, cores, device_of
from samestep.cluster.start import local
from samestep.cluster.world import join, threads_of
from samestep.engines import resolve as engines
from samestep.engines.precision import Precision
from samestep.errors import UserError
from samestep.job import Job, Run
from samestep.layout import Layout, unsized
from samestep.proof import Proof, Reference, hold_against, proof_job, reference
from samestep.recipe import Recipe
from samestep.tasks.base import Task
from samestep.tasks.resolve import resolve as resolve_task
from samestep.training.fit import fit
from samestep.training.result import TrainResult, check_folder
from samestep.validation import checked


def train(recipe: Recipe, layout: str | Layout = "single", **run: Any) -> TrainResult:
    """Train a recipe under a layout, in as many processes as it needs.

    `run` takes the keys of a job file's `run:` section: processes, engine, micro_batch, device, threads, workers,
    folder, tensorboard, rank_lines. Raises UserError for a mistake in the job, RankFailedError where a rank
    fails, InterruptedJobError where a signal stops the job.
    """
    return train_job(Job(recipe=recipe, run=_run(layout, run)))


def verify(
    recipe: Recipe, layout: str | Layout = "single", *, steps: int = 5, dropout: bool = False, **run: Any
) -> Proof:
    """Take a recipe's first steps under a layout and in one process, in float64, and compare them.

    Both are without dropout, unless `dropout` asks for the recipe's.
    `run` is as for `train`, and so are the errors. A difference is no error: see the result's `same_step`.
    """
    return verify_job(Job(recipe=recipe, run=_run(layout, run)), steps=steps, dropout=dropout)


def train_job(job: Job) -> TrainResult:
    """Train a job. Where this process is already one of many ranks, it takes its part; else it starts them."""
    layout = _layout_of(job)
    check_folder(job.run.folder)
    _check(job, layout)
    return _on_ranks(_train_rank, job, layout)


def verify_job(job: Job, *, steps: int = 5, dropout: bool = False) -> Proof:
    """Hold a job's layout against one process. Rank 0, or this process, takes the reference's steps first."""
    if steps < 1:
        raise UserError(f"steps is {steps}; it must be 1 or more")
    layout = _layout_of(job)
    task = _check(job, layout)
    job = proof_job(job, dropout=dropout)
    ranks = environment.ranks()
    with TemporaryDirectory(prefix="samestep-reference-") as folder:
        known = reference(job, task, steps, Path(folder)) if ranks is None or ranks.rank == 0 else None
        return _on_ranks(_verify_rank, job, layout, steps, known)


def _train_rank(job: Job, layout: Layout) -> TrainResult:
    with join(device=job.run.device, threads=job.run.threads) as world:
        return fit(job, resolve_task(job.recipe), world, layout)


def _verify_rank(job: Job, layout: Layout, steps: int, known: Reference | None) -> Proof:
    with join(device=job.run.device, threads=job.run.threads) as world:
        return hold_against(job, resolve_task(job.recipe), world, layout, steps, known if world.rank == 0 else None)


def _run(layout: str | Layout, run: dict[str, Any]) -> Run:
    return checked(Run, {"layout": str(layout), **run}, prefix=("run",))


def _layout_of(job: Job) -> Layout:
    """The job's layout, with what it left open filled from the number of processes."""
    ranks = environment.ranks()
    text, processes = job.run.layout, job.run.processes
    if ranks is not None:
        processes = ranks.world_size
    elif processes is None and unsized(text):
        processes = (accelerators() if job.run.device == "auto" else 0) or cores()
    return Layout.parse(text, processes)


def _check(job: Job, layout: Layout) -> Task:
    """Find what can't work before any process starts, and build the task."""
    recipe = job.recipe
    engines.check(engines.resolve(job.run.engine), layout, recipe.precision)
    if environment.ranks() is None:
        check_devices(layout.size, job.run.device)
    Precision(recipe.precision, device_of(0, job.run.device))
    layout.check_batch(recipe.batch, job.run.micro_batch)
    task = resolve_task(recipe)
    layout.check_model(task.shape())
    task.check()
    return task


def _on_ranks(function: Callable[..., Any], job: Job, layout: Layout, *arguments: Any) -> Any:
    """Call a function in every rank: here where this process is one of them, or the only one."""
    if environment.ranks() is not None or layout.size == 1:
        return function(job, layout, *arguments)
    threads = threads_of(layout.size, job.run.threads)
    job = replace(job, run=replace(job.run, threads=threads))
    return local.start(function, (job, layout, *arguments), layout.size)
