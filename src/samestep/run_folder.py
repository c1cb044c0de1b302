"""A run's folder: the one that the job names, a new one under runs/, or that of the run that it resumes."""

import os
import platform
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from samestep.input_files import parse_json
from samestep.version import VERSION

if TYPE_CHECKING:
    from samestep.job import Job

# In a run's folder. Of METRICS, EVALUATIONS and FAULTS each line is a JSON object (`json_lines`).
METRICS_FILE, EVALUATIONS_FILE, FAULTS_FILE = "metrics.jsonl", "evaluations.jsonl", "faults.jsonl"
REPORT_FILE = "report.json"
PLAN_FILE = "plan.json"  # of runs whose layout was found by a plan
MODEL_FILE = "model.safetensors"
CURVES_FILE = "curves.json"
SCHEDULE_FILE = "schedule.json"  # of runs with a pipeline
INFO_FILE = "checkpoint.json"  # without which a folder is no checkpoint
CHECKPOINTS = "checkpoints"  # in a run's folder
LOGS = "logs"  # in a run's folder
# In a run's folder and in those of its checkpoints: the earlier run that a new one replaces with its first step.
ASIDE = ".samestep-earlier-run"

_STEP = re.compile(r"step-(0|[1-9][0-9]{0,14})")


@dataclass(frozen=True, kw_only=True)
class RunPlace:
    """Where a job's run folder is, or will be."""

    folder: str | None = None  # the folder named by the job
    name: str  # of a new folder
    resumes: bool = False  # whether to resume the last saved run of that name

    @classmethod
    def of(cls, job: "Job") -> "RunPlace":
        """Derive it from a job."""
        task = job.recipe.task
        name = job.name or (task if isinstance(task, str) else type(task).__name__)
        return cls(
            folder=str(job.run.folder) if job.run.folder is not None else None,
            name=name.rpartition(":")[2],
            resumes=job.run.checkpoint is not None and job.run.checkpoint.resume in ("auto", "last"),
        )

    def chosen(self) -> Path:
        """Return the folder. Unless the job names one, each new run gets another folder."""
        if self.folder is not None:
            return Path(self.folder)
        folder = Path("runs") / self.name
        return (_last_saved(folder) if self.resumes else None) or free_folder(folder)


def free_folder(first: Path) -> Path:
    """`first`, or the first of <first>-2, <first>-3, ... that holds no run yet, so that no run is overwritten."""
    folder, number = first, 1
    while folder.exists() and any(folder.iterdir()):
        number += 1
        folder = first.with_name(f"{first.name}-{number}")
    return folder


def _last_saved(folder: Path) -> Path | None:
    """The last run that was saved of those which `free_folder` has named so."""
    name = re.compile(re.escape(folder.name) + r"(-\d+)?")
    runs = [path for path in folder.parent.glob(f"{folder.name}*") if name.fullmatch(path.name)]
    saved = [path for path in runs if candidates(path)]
    return max(saved, key=lambda path: candidates(path)[0].stat().st_mtime, default=None)


def candidates(place: Path) -> list[Path]:
    """Return the checkpoints that a path may mean, newest first: the path itself, those in it, or in its run."""
    if os.path.lexists(place / INFO_FILE):
        return [place]
    for folder in (place, place / CHECKPOINTS):
        if steps := steps_in(folder):
            return [folder / name_of(step) for step in reversed(steps)]
    return []


def name_of(step: int) -> str:
    """The name of a checkpoint."""
    return f"step-{step}"


def step_of(path: Path) -> int | None:
    """The step that a checkpoint's name says; None where it is another name."""
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match is not None else None


def steps_in(folder: Path) -> list[int]:
    """The steps of all complete checkpoints, first to last."""
    if not folder.is_dir():
        return []
    steps = [step_of(path) for path in folder.iterdir() if os.path.lexists(path / INFO_FILE)]
    return sorted(step for step in steps if step is not None)


def bytes_in(folder: Path) -> int:
    """Bytes of all files in a folder, 0 if there is none."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def lies_within(name: object) -> bool:
    """Whether a file's name, as a checkpoint's own files say it, leads to a place inside the checkpoint's folder.

    Anybody may have written those files, and `folder / name`, as PyTorch's reader of checkpoints joins them, leaves
    the folder where the name is absolute or has "..".
    """
    if not isinstance(name, str) or not name or "\\" in name or "\0" in name:
        return False
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts


@dataclass(frozen=True, kw_only=True)
class JsonLines:
    """The lines of a file of which each is a JSON object."""

    there: bool = True  # whether the file exists
    values: Sequence[dict[str, Any]] = ()
    texts: Sequence[str] = ()  # of `values`, as they stand in the file
    unreadable: Sequence[int] = ()  # the numbers, from 1, of other lines, such as the last one of a killed run


def json_lines(file: Path) -> JsonLines:
    """Read a file of JSON lines; no lines where there is no file."""
    if not file.is_file():
        return JsonLines(there=False)
    values: list[dict[str, Any]] = []
    texts: list[str] = []
    unreadable: list[int] = []
    for number, text in enumerate(file.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
        try:
            value = parse_json(text)
        except ValueError:
            value = None
        if isinstance(value, dict):
            values.append(value)
            texts.append(text)
        elif text.strip():
            unreadable.append(number)
    return JsonLines(values=values, texts=texts, unreadable=unreadable)


_PACKAGES = ("torch", "numpy", "transformers", "tokenizers", "torchmetrics")  # those of extras if they are there


@cache
def versions() -> Mapping[str, str]:
    """The versions that a checkpoint names; those of packages are read from their files, once in a process."""
    installed = {"python": platform.python_version(), "samestep": VERSION}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            installed[name] = version(name)
    return installed


def rank_file(folder: Path, rank: int, kind: str) -> Path:
    """One of a rank's files in a folder of logs: `out`, `err`, `error.json` (why it failed), `bar` (its progress)."""
    return folder / f"rank-{rank}.{kind}"


def output_of(folder: Path, rank: int) -> Path:
    """The file with a rank's standard output."""
    return rank_file(folder, rank, "out")


def errors_of(folder: Path, rank: int) -> Path:
    """The file with a rank's standard error."""
    return rank_file(folder, rank, "err")
