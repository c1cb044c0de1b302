"""The fault tolerance that a job asks for, checked before any process starts; and how it goes on after a fault."""

from collections.abc import Iterator
from dataclasses import replace

from samestep import environment
from samestep.errors import UserError
from samestep.job import Job
from samestep.layout import Layout


def check_faults(job: Job, layout: Layout, *, skips: bool) -> None:
    """Raise UserError for options that can't be combined. `skips`: whether the engine can skip a step."""
    run = job.run
    for fault in run.inject:
        if fault.rank >= layout.size:
            raise UserError(
                f'run.inject: rank {fault.rank} is not there; layout "{layout}" has the ranks 0 to {layout.size - 1}'
            )
        if fault.when is not None and fault.fault in ("nan", "slow"):
            raise UserError(
                f"run.inject: fault {fault.fault} is committed in a step that is said, and has when: {fault.when}; "
                "use step alone, or kill, raise, hang, oom, deadlock or abort"
            )
    if run.on_nonfinite != "stop" and not skips:
        raise UserError(
            f'run.on_nonfinite is {run.on_nonfinite}, and engine "{run.engine}" takes every step; use '
            "stop, or engine native"
        )
    if run.elastic and layout.data_ranks == 1:
        raise UserError(
            f'run.elastic is true, and layout "{layout}" has no replicas or shards to go on with fewer of; use '
            "a layout with dp2, zero1x2, fsdp2 or more"
        )
    if run.min_processes > layout.size:
        raise UserError(
            f'run.min_processes is {run.min_processes}, and layout "{layout}" has {layout.size}; use fewer'
        )
    if run.checkpoint is not None and run.checkpoint.memory is not None and not run.max_restarts:
        raise UserError(
            f"run.checkpoint.memory is {run.checkpoint.memory}, and copies in memory are for restarts, of which "
            "there are none; use run.max_restarts of 1 or more"
        )
    alone = environment.ranks() is not None and environment.round_of_rank() is None
    if alone and (run.max_restarts or run.elastic):
        what = f"run.max_restarts is {run.max_restarts}" if run.max_restarts else "run.elastic is true"
        raise UserError(
            f"{what}, and a launcher started these ranks, which alone can start them again; use its own restarts, "
            "or samestep's own start"
        )


def restart_begins_at_zero(job: Job, *, engine: str, saves: bool, total_steps: int) -> str | None:
    """Say so where a restart of a job's ranks takes all steps again; None where it goes on from a checkpoint.

    `saves`: whether the job's engine, which is called `engine`, has checkpoints.
    """
    run, settings = job.run, job.run.checkpoint
    restarts = max(run.max_restarts, environment.restarts_of_launcher())
    if not restarts and not run.elastic:
        return None
    begins = "a restart after a failure begins at step 0"
    if not saves:
        return f'engine "{engine}" saves no checkpoints, so {begins}; engine native goes on from the last one'
    if settings is None:
        return f"nothing is saved, so {begins}; set run.checkpoint.every (--checkpoint-every 10m)"
    more = settings.memory is not None or settings.best is not None or job.recipe.early_stop is not None
    if not more and (settings.every is None or (isinstance(settings.every, int) and settings.every >= total_steps)):
        return (
            f"nothing is saved before the last of {total_steps:,} steps (run.checkpoint.every: {settings.every}), so "
            f"{begins}, or where this start does; use a shorter interval (--checkpoint-every 10m)"
        )
    return None


def needs_ranks(job: Job, layout: Layout) -> bool:
    """Whether the ranks must be child processes under supervision: several ranks, restarts, or injected faults."""
    return layout.size > 1 or job.run.max_restarts > 0 or bool(job.run.inject)


def again(job: Job) -> Job:
    """Return the job resuming from its last checkpoint, or unchanged if it saves none."""
    if job.run.checkpoint is None:
        return job
    return replace(job, run=replace(job.run, checkpoint=replace(job.run.checkpoint, resume="auto")))


def shrink(layout: Layout, fewest: int) -> Iterator[Layout]:
    """The layouts with fewer data ranks and at least `fewest` processes, the largest first."""
    axis = "replicate" if layout.replicate > 1 else "shard"
    size = getattr(layout, axis)
    for parts in range(size - 1, 0, -1):
        smaller = replace(layout, **{axis: parts})
        if smaller.size < fewest:
            return
        yield smaller
