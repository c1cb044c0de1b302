"""What an earlier run has left in a training's folder: a new training never replaces it without being told.

    in the folder                       resume: never     auto                     last (--resume)
    nothing of a run                    begins            begins, and says so      refused
    checkpoints                         refused           goes on                  goes on
    a finished run without checkpoints  refused           refused                  refused
    an interrupted one without          refused           begins, and says so      refused

`resume: auto` is what a scheduler starts again and again, also before the first checkpoint. `run.overwrite` (--force)
removes what is in the way. What a launcher starts again after a failure may replace its own records.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

from samestep.checkpoint.folder import remove_all
from samestep.errors import CheckpointError, UserError, shown
from samestep.fault_tolerance.nonfinite import FILES as NONFINITE_FILES
from samestep.job import Job
from samestep.profiling.profiler import PROFILE_FILE
from samestep.run_folder import (
    CHECKPOINTS,
    CURVES_FILE,
    EVALUATIONS_FILE,
    FAULTS_FILE,
    METRICS_FILE,
    MODEL_FILE,
    REPORT_FILE,
    SCHEDULE_FILE,
    steps_in,
)

_RESULTS = (REPORT_FILE, MODEL_FILE, CURVES_FILE, SCHEDULE_FILE)  # of a run that has ended well
_RECORDS = (METRICS_FILE, EVALUATIONS_FILE)  # of one that has taken steps
_FURTHER = (FAULTS_FILE, "schedule.svg", "plan.json", NONFINITE_FILES, "tensorboard/events.out.tfevents.*")

_OTHERWISE = "name another folder, or have it replaced with --force (run.overwrite: true)"


def check_earlier_run(job: Job, folder: Path, *, started_again: bool, removes: bool = True) -> None:
    """Raise UserError for a folder in which the training would replace an earlier run's files.

    `started_again`: an earlier attempt of the same start has written there. `removes`: whether this is the process
    that removes an earlier run, where the job says so.
    """
    run, settings = job.run, job.run.checkpoint
    place = checkpoints_of(job, folder)
    resume = "never" if settings is None else settings.resume
    holding = {each: steps for each in (place, *fallback_of(job)) if (steps := steps_in(each))}
    steps = sorted(step for steps in holding.values() for step in steps)
    if steps and (resume in ("auto", "last") or _lies_in(resume, place)):
        return
    if resume == "last":
        raise CheckpointError(
            f"--resume: {shown(place)} has no checkpoint to go on from; name the folder of a run that has one, or "
            "leave --resume out to begin at step 0 (what a scheduler starts again has run.checkpoint.resume: auto)"
        )
    if run.overwrite and not started_again:
        if removes:
            _remove(folder, (place, *fallback_of(job)))
        return
    if steps:
        raise CheckpointError(
            f"{shown(next(iter(holding)))} holds checkpoints of a training, up to step {steps[-1]:,}; resume: auto "
            "(--resume) goes on from there, another folder begins again, and --force (run.overwrite: true) replaces "
            "it"
        )
    if (result := next(_there(folder, _RESULTS), None)) is not None:
        without = "" if resume == "never" else " without checkpoints, from which nothing can go on"
        raise UserError(f"{shown(folder)} holds a finished run ({result.name}){without}; {_OTHERWISE}")
    if resume == "auto" or started_again:
        return
    if (record := next(_there(folder, _RECORDS), None)) is not None:
        raise UserError(
            f"{shown(folder)} holds an interrupted run without checkpoints ({record.name}); {_OTHERWISE}; what a "
            "scheduler starts again has run.checkpoint.resume: auto"
        )
    if run.profile is not None and run.profile.folder is not None:
        for file in _there(run.profile.folder, (PROFILE_FILE,)):
            raise UserError(f"run.profile.folder: {shown(file)} is there already; {_OTHERWISE}")


def checkpoints_of(job: Job, folder: Path) -> Path:
    """The folder of a job's checkpoints, where its run's folder is `folder`."""
    settings = job.run.checkpoint
    return folder / CHECKPOINTS if settings is None or settings.folder is None else settings.folder


def fallback_of(job: Job) -> list[Path]:
    """The further folders of a job's checkpoints."""
    settings = job.run.checkpoint
    return [settings.fallback_folder] if settings is not None and settings.fallback_folder is not None else []


def _lies_in(resume: str, place: Path) -> bool:
    """Whether the path to resume from is a checkpoint of the training's own folder."""
    path = Path(resume)
    return resume != "never" and any(part.exists() and part.samefile(place) for part in (path, path.parent))


def _there(folder: Path, names: tuple[str, ...]) -> Iterator[Path]:
    """Those files that hold something; an empty one has nothing to lose."""
    for name in names:
        for file in sorted(folder.glob(name)):
            if file.is_file() and file.stat().st_size > 0:
                yield file


def _remove(folder: Path, places: Iterable[Path]) -> None:
    """Remove an earlier run's files and checkpoints, and nothing else. Raises UserError."""
    try:
        for file in (*_there(folder, _RESULTS), *_there(folder, _RECORDS), *_there(folder, _FURTHER)):
            file.unlink()
        for place in places:
            remove_all(place)
    except OSError as error:
        raise UserError(f"--force: {error.filename or folder} can't be removed: {error.strerror}") from None
