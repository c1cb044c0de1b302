"""What an earlier run has left in a training's folder: a new training never replaces it without being told.

    in the folder                       resume: never     auto                     last (--resume)
    nothing of a run                    begins            begins, and says so      refused
    checkpoints                         refused           goes on                  goes on
    a finished run without checkpoints  refused           refused                  refused
    an interrupted one without          refused           begins, and says so      refused

`resume: auto` is what a scheduler starts again and again, also before the first checkpoint. `run.overwrite` (--force)
removes what is in the way. What a launcher starts again after a failure may replace its own records.

What is in the way is set aside first, into `ASIDE` of each folder, and removed when the new training has taken its
first step (`forget`). A training that ends before it puts it back (`put_back`); after a kill the next start does.
"""

import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from samestep.checkpoint.folder import removable_in
from samestep.errors import CheckpointError, UserError, shown
from samestep.fault_tolerance.nonfinite import FILES as NONFINITE_FILES
from samestep.job import Job
from samestep.profiling.profiler import PROFILE_FILE
from samestep.run_folder import (
    ASIDE,
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
    that sets an earlier run aside, where the job says so.
    """
    run, settings = job.run, job.run.checkpoint
    place = checkpoints_of(job, folder)
    resume = "never" if settings is None else settings.resume
    replaces = run.overwrite and started_again  # what is set aside was in the way of the start before
    if removes and not replaces:
        put_back(job, folder)
    places = (place, *fallback_of(job))
    holding = {place: steps for place in places if (steps := _steps_in(place, aside=not replaces))}
    steps = sorted(step for steps in holding.values() for step in steps)
    if steps and (resume in ("auto", "last") or _lies_in(resume, place)):
        return
    if resume == "last":
        raise CheckpointError(
            f"--resume: {shown(place)} has no checkpoint to go on from; {_instead(folder, replaces)}"
        )
    if run.overwrite and not started_again:
        if removes:
            _set_aside(folder, places)
        return
    if steps:
        raise CheckpointError(
            f"{shown(next(iter(holding)))} holds checkpoints of a training, up to step {steps[-1]:,}; resume: auto "
            "(--resume) goes on from there, another folder begins again, and --force (run.overwrite: true) replaces "
            "it"
        )
    if (result := next(_there(folder, _RESULTS, aside=not replaces), None)) is not None:
        without = "" if resume == "never" else " without checkpoints, from which nothing can go on"
        raise UserError(f"{shown(folder)} holds a finished run ({result.name}){without}; {_OTHERWISE}")
    if resume == "auto" or started_again:
        return
    if (record := next(_there(folder, _RECORDS, aside=not replaces), None)) is not None:
        raise UserError(
            f"{shown(folder)} holds an interrupted run without checkpoints ({record.name}); {_OTHERWISE}; what a "
            "scheduler starts again has run.checkpoint.resume: auto"
        )
    if run.profile is not None and run.profile.folder is not None:
        for file in _there(run.profile.folder, (PROFILE_FILE,)):
            raise UserError(f"run.profile.folder: {shown(file)} is there already; {_OTHERWISE}")


def _instead(folder: Path, replaces: bool) -> str:
    """What to do in place of a resume, where no checkpoint is."""
    earlier = next(_there(folder, (*_RESULTS, *_RECORDS), aside=not replaces), None)
    if earlier is not None:
        return (
            "name the folder of a run that has one, or leave --resume out to begin at step 0: "
            f"{shown(earlier)} is of an earlier run, so {_OTHERWISE}"
        )
    return (
        "name the folder of a run that has one, or leave --resume out to begin at step 0 (what a scheduler starts "
        "again has run.checkpoint.resume: auto)"
    )


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


def _steps_in(place: Path, *, aside: bool) -> list[int]:
    """The steps of the checkpoints in a folder; `aside`: also of those that an ended start has set aside there."""
    return sorted({*steps_in(place), *(steps_in(place / ASIDE) if aside else ())})


def _there(folder: Path, names: tuple[str, ...], *, aside: bool = False) -> Iterator[Path]:
    """Those files that hold something; an empty one has nothing to lose.

    `aside`: also those that an ended start has set aside.
    """
    for name in names:
        for place in (folder, *((folder / ASIDE,) if aside else ())):
            for file in sorted(place.glob(name)):
                if file.is_file() and file.stat().st_size > 0:
                    yield file


def _set_aside(folder: Path, places: Iterable[Path]) -> None:
    """Move an earlier run's files and checkpoints, and nothing else, into `ASIDE`. Raises UserError."""
    checkpoints = {place: removable_in(place) for place in places}
    try:
        _move(
            (*_there(folder, _RESULTS), *_there(folder, _RECORDS), *_there(folder, _FURTHER)), folder, folder / ASIDE
        )
        for place, paths in checkpoints.items():
            _move(paths, place, place / ASIDE)
    except OSError as error:
        raise UserError(f"--force: {error.filename or folder} can't be removed: {error.strerror}") from None


def _move(paths: Iterable[Path], source: Path, target: Path) -> None:
    """Move files and folders to the same places in another folder of the same disk."""
    for path in paths:
        moved = target / path.relative_to(source)
        moved.parent.mkdir(parents=True, exist_ok=True)
        path.replace(moved)


def _asides(job: Job, folder: Path) -> Sequence[Path]:
    """Where a job's earlier run may be set aside."""
    return [folder_ / ASIDE for folder_ in dict.fromkeys((folder, checkpoints_of(job, folder), *fallback_of(job)))]


def set_aside_in(job: Job, folder: Path) -> Path | None:
    """Where an earlier run is set aside; None if there is none."""
    return next((aside for aside in _asides(job, folder) if aside.is_dir()), None)


def put_back(job: Job, folder: Path) -> None:
    """Move back what was set aside for a training that ended before its first step; there may be nothing.

    What that training has written in the same places is replaced. Raises UserError.
    """
    try:
        for aside in _asides(job, folder):
            if not aside.is_dir():
                continue
            if aside.parent == folder:
                for file in (*_there(folder, _RECORDS), *_there(folder, _FURTHER)):
                    if file.name != FAULTS_FILE:  # says why it ended
                        file.unlink()
            for path in aside.iterdir():  # a checkpoint as a whole
                inside = [path] if not (aside.parent / path.name).is_dir() else [*path.iterdir()]
                _move(inside, aside, aside.parent)
            shutil.rmtree(aside)
    except OSError as error:
        raise UserError(
            f"the earlier run that --force has set aside can't be put back: {error.filename}: {error.strerror}"
        ) from None


def forget(job: Job, folder: Path) -> None:
    """Remove what was set aside, as the new training has taken its first step. Raises UserError.

    Renamed first, all or nothing, so that what is partly removed is never put back.
    """
    renamed: dict[Path, Path] = {}
    try:
        for aside in _asides(job, folder):
            gone = aside.with_name(ASIDE + ".removed")
            shutil.rmtree(gone, ignore_errors=True)
            if aside.is_dir():
                aside.replace(gone)
                renamed[gone] = aside
    except OSError as error:
        for gone, aside in renamed.items():
            with suppress(OSError):
                gone.replace(aside)
        raise UserError(f"--force: {error.filename} can't be removed: {error.strerror}") from None
    for gone in renamed:
        shutil.rmtree(gone, ignore_errors=True)
