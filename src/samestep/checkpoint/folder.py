"""The folder of a training's checkpoints: `step-<number>` each, a name that only complete ones have.

`checkpoint.json` says what a checkpoint is; checksums are made when files are written, and compared before they are
used.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from samestep.checkpoint.compatibility import Base, base_of_json
from samestep.errors import CheckpointError
from samestep.run_folder import INFO_FILE, lies_within, name_of, steps_in

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class FileSum:
    """Size and checksum of a checkpoint's file, taken when it was written."""

    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Info:
    """The contents of `checkpoint.json`: the progress of the training, and the job that saved it."""

    step: int  # optimizer steps taken; the next step has this number, counted from 0
    epoch: int | None  # None where epochs are not counted
    layout: str
    processes: int
    engine: str
    recipe: Mapping[str, Any]  # as in the job file; empty for a custom training loop
    scaler: Mapping[str, float] = field(default_factory=dict)  # state of the loss scaler, under fp16
    metrics: Mapping[str, float] = field(default_factory=dict)  # of the evaluation after this step
    extra: Mapping[str, Any] = field(default_factory=dict)  # values that a custom training loop saved along
    base: Base | None = None  # the frozen parameters that are left out; None: none are
    tied: Mapping[str, str] = field(default_factory=dict)  # a tied parameter's further name -> its saved name
    versions: Mapping[str, str] = field(default_factory=dict)
    saved_at: str = ""  # ISO 8601
    files: Mapping[str, FileSum] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1, ensure_ascii=False) + "\n"


def read_info(folder: Path) -> Info:
    """Read a checkpoint's info. Raises CheckpointError if the file is missing, damaged or of another format."""
    file = folder / INFO_FILE
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is no checkpoint: it has no {INFO_FILE}") from None
    except OSError as error:
        raise CheckpointError(f"{file} can't be read: {error.strerror}") from None
    except ValueError as error:
        raise CheckpointError(f"{file} is damaged: {error}") from None
    known = {each.name for each in fields(Info)}
    if not isinstance(values, dict) or values.get("format") != FORMAT or not known - {"base"} <= values.keys():
        found = values.get("format") if isinstance(values, dict) else None
        raise CheckpointError(f"{file} is of format {found}; this version of samestep reads format {FORMAT}")
    try:
        sums = {str(name): FileSum(**each) for name, each in values["files"].items()}
    except (TypeError, AttributeError):
        raise CheckpointError(f"{file} is damaged: its list of files is not one") from None
    if outside := [name for name in sums if not lies_within(name)]:
        raise CheckpointError(f"{file} is damaged: it has a sum of {outside[0]!r}, outside of its folder")
    try:
        base = None if values.get("base") is None else base_of_json(values["base"])
    except (TypeError, KeyError):
        raise CheckpointError(f"{file} is damaged: what it says of a base is not of one") from None
    read = {"files": sums, "base": base}
    return Info(**{**{name: values[name] for name in known - read.keys()}, **read})


AT_ONCE = 1 << 20  # bytes


def sums_of(folder: Path, names: Iterable[str]) -> dict[str, FileSum]:
    """Compute the sizes and checksums of the named files of a folder."""
    return {name: _sum_of(folder / name) for name in names}


def _sum_of(file: Path, advance: Callable[[int], None] | None = None) -> FileSum:
    """Compute the size and SHA-256 of a file; `advance` is called with the bytes of each block that is read."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(AT_ONCE))
    with file.open("rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            digest.update(buffer[:count])
            if advance is not None:
                advance(count)
    return FileSum(bytes=file.stat().st_size, sha256=digest.hexdigest())


def fault_of(
    folder: Path, expected: Mapping[str, FileSum], advance: Callable[[int], None] | None = None
) -> str | None:
    """Describe the first file that is missing or altered; None if all files match `expected`.

    `advance` is called with the bytes of each block that is read.
    """
    for name, wanted in expected.items():
        file = folder / name
        if not file.is_file():
            return f"{file} is missing"
        if file.stat().st_size != wanted.bytes:
            return f"{file} has {file.stat().st_size:,} bytes, and {wanted.bytes:,} were written"
        if _sum_of(file, advance) != wanted:
            return f"{file} is not what was written: its checksum differs"
    return None


UNFINISHED = ".saving"
_REPLACED = ".replaced"
_LEFT = re.compile(rf"(step-\d{{1,15}})({re.escape(UNFINISHED)}|{re.escape(_REPLACED)})")
# Names of the files that PyTorch's writer and this package create in a checkpoint, temporary ones included.
_WRITTEN = re.compile(rf"__\d+_\d+\.distcp|\.metadata(\.tmp)?|{re.escape(INFO_FILE)}")


@dataclass(frozen=True, kw_only=True)
class FoundCheckpoint:
    """A checkpoint that is complete according to its name and its info; its files are not verified."""

    path: Path
    info: Info


def found_in(folder: Path) -> list[FoundCheckpoint]:
    """The complete checkpoints of a folder whose info can be read, by ascending step."""
    found: list[FoundCheckpoint] = []
    for step in steps_in(folder):
        path = folder / name_of(step)
        try:
            found.append(FoundCheckpoint(path=path, info=read_info(path)))
        except CheckpointError:
            continue
    return found


def remove_unfinished(folder: Path) -> None:
    """Remove the folders that an interrupted save left behind.

    Only folders are removed that have the name of an unfinished checkpoint and hold nothing but a checkpoint's files.
    """
    for path in _left_in(folder):
        shutil.rmtree(path)


def unfinished_in(folder: Path) -> list[Path]:
    """The unfinished checkpoints in a folder, by name."""
    return sorted(path for path in _left_in(folder) if path.name.endswith(UNFINISHED))


def _left_in(folder: Path) -> list[Path]:
    """The folders that an interrupted save left behind."""
    if not folder.is_dir():
        return []
    named = [path for path in folder.iterdir() if _LEFT.fullmatch(path.name)]
    return [path for path in named if path.is_dir() and not path.is_symlink() and _is_of_a_checkpoint(path)]


def _is_of_a_checkpoint(folder: Path) -> bool:
    """Whether a folder holds nothing but a checkpoint's files."""
    return all(_WRITTEN.fullmatch(path.name) and path.is_file() for path in folder.iterdir())


def make_complete(unfinished: Path) -> Path:
    """Rename a fully written checkpoint to its final name, which marks it as complete, and return the new path."""
    path = unfinished.with_name(unfinished.name.removesuffix(UNFINISHED))
    replaced = path.with_name(path.name + _REPLACED)
    if path.exists():  # a damaged one, or one of a branch that a rollback discarded
        path.rename(replaced)
    unfinished.rename(path)
    shutil.rmtree(replaced, ignore_errors=True)
    return path


def best_of(found: Sequence[FoundCheckpoint], metric: str, *, lowest: bool) -> FoundCheckpoint | None:
    """The checkpoint with the best value of a metric, the earliest among equals; None if none has the metric."""
    scored = [each for each in found if metric in each.info.metrics]
    if not scored:
        return None
    values = [each.info.metrics[metric] for each in scored]
    return scored[values.index(min(values) if lowest else max(values))]


def prune(folder: Path, *, keep: int, best: Path | None = None) -> None:
    """Remove all checkpoints but the last `keep` and the best one."""
    for step in steps_in(folder)[:-keep]:
        path = folder / name_of(step)
        if path != best:
            # Renamed first, so that a partly removed folder is never taken for a checkpoint.
            gone = path.with_name(path.name + _REPLACED)
            path.rename(gone)
            shutil.rmtree(gone)
