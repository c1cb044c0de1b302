"""All checks of a job, in the order in which they are made: each once, whatever starts the job."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from samestep import environment
from samestep.contract.check import check_contract
from samestep.door.layouts import first_of_several, settle
from samestep.door.preflight import preflight
from samestep.door.ready import BuiltTask, Ready
from samestep.job import Job
from samestep.layout import Layout
from samestep.progress import phases
from samestep.tasks.base import Task
from samestep.training.checkpointing import check_place
from samestep.training.own_folder import check_folder_free
from samestep.training.result import check_folder


def check(
    job: Job,
    layout: Layout | None = None,
    *,
    task: Task | None = None,
    here: bool = True,
    writes: bool = False,
    command: Callable[[Job, Layout], None] | None = None,
) -> Ready:
    """Check a job before any process starts; the task's contract comes after it (`hold_contract`).

    `layout`: None reads the job's own. `task`: the job's, None builds it. `here`: false where all ranks are on other
    hosts, whose accelerators are not known. `writes`: whether the command writes the run's folder. `command` checks
    what the command alone asks of a settled job. Raises UserError for the first mistake.
    """
    job, layout = settle(job, layout)
    if command is not None:
        command(job, layout)
    if writes:
        _check_folders(job)
    return Ready(job=job, layout=layout, built=BuiltTask(preflight(job, layout, task, here=here)))


def hold_contract(ready: Ready, *, dropout: bool = True, among: Sequence[str] = ()) -> None:
    """Check the task's contract once for all ranks: in the process that starts them, or on rank 0.

    It is the last check, and the longest. Without `dropout` the contract is that of a proof, whose model has none.
    `among`: the layouts of which many are to come, where the job itself is of one process.
    """
    job, ranks = ready.job, environment.ranks()
    if job.run.check and (ranks is None or ranks.rank == 0):
        recipe = replace(job.recipe, dropout=job.recipe.dropout and dropout)
        with phases.phase("checking the task's contract"):
            several = first_of_several(among, job.run.processes)
            check_contract(replace(job, recipe=recipe), ready.layout, ready.task, spread=several)


def _check_folders(job: Job) -> None:
    """Raise UserError for folders that can't be written, or that another training holds."""
    check_folder(job.run.folder)
    if job.run.profile is not None:
        check_folder(job.run.profile.folder, "run.profile.folder")
    check_place(job.run.checkpoint, job.run.folder)
    if job.run.folder is not None and environment.ranks() is None:  # a rank may find it held for its own job
        check_folder_free(job, job.run.folder)
