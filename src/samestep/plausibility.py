"""Settings of a job that are allowed one by one and can't be meant together, such as a warm-up beyond the last step.

They are looked for in what a user has written: in job files with their flags, and in what `samestep.train` is given.
Commands that shorten a job, to drill it, take `shortened`.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from samestep.communication import LocalSGD, OneBitAdam, PowerSGD
from samestep.errors import UserError
from samestep.job import Job
from samestep.recipe import SGD, AdamW, Recipe, Schedule, steps_of

Keys = tuple[str, ...]
Finding = tuple[Keys, str]  # a key, and what is wrong with its value


def implausible(job: Job) -> Iterator[Finding]:
    """What can't be meant, with the key of the value to change. `check_lengths` has what needs the data's length."""
    if job.recipe.steps is not None:
        yield from _lengths(job, job.recipe.steps, job.recipe.evaluation.every)
    yield from _rates(job)


def check_plausible(job: Job) -> None:
    """Raise UserError for the first setting that can't be meant."""
    _raise_first(implausible(job))


def check_lengths(job: Job, samples: int) -> None:
    """Raise UserError for what begins or happens after the last step. `samples`: in the training set."""
    steps_per_epoch = -(-samples // job.recipe.batch)
    every = job.recipe.evaluation.steps_between(steps_per_epoch)
    _raise_first(_lengths(job, job.recipe.total_steps(steps_per_epoch), every))


def _raise_first(findings: Iterator[Finding]) -> None:
    for path, what in findings:
        raise UserError(f"{'.'.join(path)} {what}")


def _of_groups_too(recipe: Recipe, name: str) -> Iterator[tuple[Keys, Any]]:
    """A setting of the recipe, and of those groups that have their own, each with its key."""
    yield ("recipe", name), getattr(recipe, name)
    for index, group in enumerate(recipe.groups):
        if (own := getattr(group, name)) is not None:
            yield ("recipe", "groups", str(index), name), own


def _lengths(job: Job, steps: int, every: int | str | None) -> Iterator[Finding]:
    """What begins or happens after the last of so many steps. `every`: steps between evaluations, if known."""
    recipe = job.recipe
    has = f"recipe.steps is {steps}" if recipe.steps is not None else f"the training has {steps} steps"
    for path, schedule in _of_groups_too(recipe, "schedule"):
        if schedule.warmup >= 1 and schedule.warmup > steps:
            yield (
                (*path, "warmup"),
                f"is {schedule.warmup:g} steps, and the training has {steps}, so the full rate would never be "
                f"reached; use {steps} or fewer, or a fraction such as 0.1",
            )
        elif schedule.hold and steps_of(schedule.warmup, steps) + steps_of(schedule.hold, steps) >= steps:
            yield (
                (*path, "hold"),
                f"is {schedule.hold:g} after a warm-up of {steps_of(schedule.warmup, steps)} steps, and the training "
                f"has {steps}, so the decay would never begin; hold the full rate for fewer, or leave decay out",
            )
    late = f"and {has}, so it would never begin; use fewer"
    communication = recipe.communication
    if isinstance(communication, OneBitAdam) and communication.warmup >= steps:
        yield ("recipe", "communication", "warmup"), f"is {communication.warmup}, {late}"
    if isinstance(communication, (PowerSGD, LocalSGD)) and communication.start >= steps:
        yield ("recipe", "communication", "start"), f"is {communication.start}, {late}"
    checkpoint = job.run.checkpoint
    if checkpoint is not None and checkpoint.memory is not None and checkpoint.memory >= steps:
        yield (
            ("run", "checkpoint", "memory"),
            f"is {checkpoint.memory} and {has}, so no copy would be made before the end; use fewer steps from one "
            "copy to the next",
        )
    if isinstance(every, int):
        yield from _evaluations(recipe, steps, every, has)


def _evaluations(recipe: Recipe, steps: int, every: int, has: str) -> Iterator[Finding]:
    """Evaluations that come too late for anything."""
    shown = f"epoch ({every} steps)" if recipe.evaluation.every == "epoch" else str(every)
    if recipe.early_stop is not None and every >= steps:
        yield (
            ("recipe", "evaluation", "every"),
            f"is {shown} and {has}, so early_stop would look at no evaluation before the end; evaluate more often, "
            "or leave early_stop out",
        )
    elif every > steps and not recipe.evaluation.at_end:
        yield (
            ("recipe", "evaluation", "every"),
            f"is {shown}, {has}, and at_end is false, so nothing would be evaluated; use {steps} or less, or "
            "at_end: true",
        )


def _rates(job: Job) -> Iterator[Finding]:
    """Weights that a step of decay would turn around, and a final rate without a way to it."""
    recipe = job.recipe
    for path, optimizer in _of_groups_too(recipe, "optimizer"):
        if isinstance(optimizer, (AdamW, SGD)) and optimizer.lr * optimizer.weight_decay >= 1:
            yield (
                (*path, "weight_decay"),
                f"is {optimizer.weight_decay:g} and lr is {optimizer.lr:g}; a step takes their product away from "
                f"every weight, which is all of it or more; use a weight_decay below {1 / optimizer.lr:.3g}",
            )
    if recipe.schedule.final and recipe.schedule.decay == "none":
        yield (
            ("recipe", "schedule", "final"),
            f"is {recipe.schedule.final:g} and decay is none, which keeps the rate; use decay: linear or cosine, or "
            "leave final out",
        )


def shortened(recipe: Recipe, steps: int) -> Recipe:
    """The recipe with so many steps, and with nothing that would begin after them."""
    evaluation, communication = recipe.evaluation, recipe.communication
    if evaluation.every == "epoch" or (evaluation.every is not None and evaluation.every >= steps):
        evaluation = replace(evaluation, every=steps)
    if isinstance(communication, OneBitAdam):
        communication = replace(communication, warmup=min(communication.warmup, max(1, steps - 1)))
    elif isinstance(communication, (PowerSGD, LocalSGD)):
        communication = replace(communication, start=min(communication.start, steps - 1))
    groups = tuple(
        group if group.schedule is None else replace(group, schedule=_shortened(group.schedule, steps))
        for group in recipe.groups
    )
    return replace(
        recipe,
        steps=steps,
        epochs=None,
        schedule=_shortened(recipe.schedule, steps),
        groups=groups,
        evaluation=evaluation,
        communication=communication,
        early_stop=None if evaluation.every == steps else recipe.early_stop,
    )


def _shortened(schedule: Schedule, steps: int) -> Schedule:
    warmup = min(schedule.warmup, steps)
    hold = schedule.hold
    if steps_of(warmup, steps) + steps_of(hold, steps) >= steps:
        hold = 0.0
    return replace(schedule, warmup=warmup, hold=hold)
