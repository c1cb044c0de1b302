"""Settings of a job that are allowed one by one and can't be meant together, such as a warm-up beyond the last step.

They are looked for in what a user has written: in job files with their flags, and in what `samestep.train` is given.
Commands that shorten a job, to drill it, take `shortened`.
"""

from collections.abc import Iterator
from dataclasses import replace

from samestep.communication import LocalSGD, OneBitAdam, PowerSGD
from samestep.errors import UserError
from samestep.job import Job
from samestep.recipe import SGD, AdamW, Recipe, Schedule

Keys = tuple[str, ...]
Finding = tuple[Keys, str]  # a key, and what is wrong with its value


def implausible(job: Job) -> Iterator[Finding]:
    """What can't be meant, with the key of the value to change."""
    yield from _lengths(job)
    yield from _rates(job)
    yield from _copies(job)


def check_plausible(job: Job) -> None:
    """Raise UserError for the first setting that can't be meant."""
    for path, what in implausible(job):
        raise UserError(f"{'.'.join(path)} {what}")


def _lengths(job: Job) -> Iterator[Finding]:
    """What begins or happens after the last step."""
    recipe = job.recipe
    if recipe.steps is None:  # known once the data are read: `wrong_warmup` is asked again
        return
    schedules = {("recipe", "schedule"): recipe.schedule}
    schedules |= {
        ("recipe", "groups", str(index), "schedule"): group.schedule
        for index, group in enumerate(recipe.groups)
        if group.schedule is not None
    }
    for path, schedule in schedules.items():
        if wrong := wrong_warmup(schedule, recipe.steps):
            yield (*path, "warmup"), wrong
    late = f"and recipe.steps is {recipe.steps}, so it would never begin; use fewer"
    communication = recipe.communication
    if isinstance(communication, OneBitAdam) and communication.warmup >= recipe.steps:
        yield ("recipe", "communication", "warmup"), f"is {communication.warmup}, {late}"
    if isinstance(communication, (PowerSGD, LocalSGD)) and communication.start >= recipe.steps:
        yield ("recipe", "communication", "start"), f"is {communication.start}, {late}"
    every = recipe.evaluation.every
    if every is None:
        return
    if recipe.early_stop is not None and every >= recipe.steps:
        yield (
            ("recipe", "evaluation", "every"),
            f"is {every} and recipe.steps is {recipe.steps}, so early_stop would look at no evaluation before the "
            "end; evaluate more often, or leave early_stop out",
        )
    elif every > recipe.steps and not recipe.evaluation.at_end:
        yield (
            ("recipe", "evaluation", "every"),
            f"is {every}, recipe.steps is {recipe.steps}, and at_end is false, so nothing would be evaluated; use "
            f"{recipe.steps} or less, or at_end: true",
        )


def wrong_warmup(schedule: Schedule, steps: int) -> str | None:
    """What is wrong with a warm-up in a training of so many steps; None if nothing is."""
    if schedule.warmup < 1 or schedule.warmup <= steps:
        return None
    return (
        f"is {schedule.warmup:g} steps, and the training has {steps}, so the full rate would never be reached; use "
        f"{steps} or fewer, or a fraction such as 0.1"
    )


def _rates(job: Job) -> Iterator[Finding]:
    """Weights that a step of decay would turn around, and a final rate without a way to it."""
    recipe = job.recipe
    optimizers = {("recipe", "optimizer"): recipe.optimizer}
    optimizers |= {
        ("recipe", "groups", str(index), "optimizer"): group.optimizer
        for index, group in enumerate(recipe.groups)
        if group.optimizer is not None
    }
    for path, optimizer in optimizers.items():
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


def _copies(job: Job) -> Iterator[Finding]:
    """Copies in memory of which the training makes none."""
    checkpoint, steps = job.run.checkpoint, job.recipe.steps
    if checkpoint is not None and checkpoint.memory is not None and steps is not None and checkpoint.memory >= steps:
        yield (
            ("run", "checkpoint", "memory"),
            f"is {checkpoint.memory} and recipe.steps is {steps}, so no copy would be made before the end; use fewer "
            "steps from one copy to the next",
        )


def shortened(recipe: Recipe, steps: int) -> Recipe:
    """The recipe with so many steps, and with nothing that would begin after them."""
    evaluation, communication = recipe.evaluation, recipe.communication
    if evaluation.every is not None and evaluation.every >= steps:
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
    return replace(schedule, warmup=steps) if schedule.warmup > steps else schedule
