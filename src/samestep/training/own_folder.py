"""A training's folder for itself: chosen, without another run's files, and held by a lease to the training's end."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from samestep import environment
from samestep.fault_tolerance import lease
from samestep.fault_tolerance.lease import FolderInUseError, Held
from samestep.fault_tolerance.rank import Round
from samestep.job import Job
from samestep.run_folder import RunPlace
from samestep.training.earlier_run import check_earlier_run, checkpoints_of, fallback_of, put_back, set_aside_in


@contextmanager
def folder_held(job: Job, round_: Round | None) -> Iterator[tuple[Job, Held | None]]:
    """Hold the leases of a training's folders in the one process that writes there or starts the ranks that do.

    Gives the job with its run's folder, and the leases, None on the other ranks. An earlier run that the job replaces
    is back in its place if the training ends before its first step. Raises FolderInUseError where another training
    holds a folder, UserError where an earlier run's files would be replaced.
    """
    ranks = environment.ranks()
    first = round_ is None or round_.number == 0
    again = not first or environment.started_again()
    if ranks is not None and ranks.rank > 0:
        if first and job.run.folder is not None:
            check_earlier_run(job, job.run.folder, started_again=again, removes=False)
        yield job, None
        return
    with ExitStack() as stack:
        job, held = _take_folder(job, stack, None if round_ is None else round_.start)
        assert job.run.folder is not None
        try:
            if first:
                check_earlier_run(job, job.run.folder, started_again=again)
            yield job, held
        finally:
            if round_ is None and job.run.overwrite:
                put_back(job, job.run.folder)
            elif aside := set_aside_in(job, job.run.folder):  # ranks may start again, and then replace it
                print(f"samestep: the earlier run is in {aside} until the next start in its folder", file=sys.stderr)


def check_folder_free(job: Job, folder: Path) -> None:
    """Raise UserError, before anything is started or written, where rank 0 is known to refuse the folder."""
    for written in _folders_of(job, folder):
        lease.check_free(written)
    check_earlier_run(job, folder, started_again=environment.started_again(), removes=False)


def _folders_of(job: Job, folder: Path) -> tuple[Path, ...]:
    """The folders that a training writes: its run's, and those of its checkpoints."""
    return (folder, *(() if job.run.checkpoint is None else (checkpoints_of(job, folder), *fallback_of(job))))


def _take_folder(job: Job, stack: ExitStack, start: str | None) -> tuple[Job, Held]:
    """Choose the run's folder and hold its leases until the stack ends; `start`: the id of the job's start."""
    place = RunPlace.of(job)
    while True:
        folder = place.chosen()
        try:
            held = stack.enter_context(lease.hold(_folders_of(job, folder), job=start))
        except FolderInUseError as error:
            # Another training that began at the same moment has taken the new folder, so there is another new one.
            if place.folder is None and error.folder == folder.absolute() and place.chosen() != folder:
                continue
            raise
        return replace(job, run=replace(job.run, folder=folder)), held
