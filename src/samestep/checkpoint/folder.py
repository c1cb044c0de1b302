"""The folder of a training's checkpoints: `step-<number>` each, a name that only complete ones have.

Checksums are made when files are written, and compared before they are used.
"""

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from samestep.checkpoint.info import FileSum, Info, read_info
from samestep.checkpoint.plain_files import open_plain
from samestep.checkpoint.safe_index import METADATA_FILE
from samestep.errors import CheckpointError, UserError
from samestep.run_folder import CHECKPOINTS, INFO_FILE, candidates, name_of, step_of, steps_in

AT_ONCE = 1 << 20  # bytes


def sums_of(folder: Path, names: Iterable[str]) -> dict[str, FileSum]:
    """Compute the sizes and checksums of the named files of a folder. Raises OSError, CheckpointError."""
    sums: dict[str, FileSum] = {}
    for name in names:
        with open_plain(folder / name) as stream:
            sums[name] = FileSum(sha256=_sha256(stream), bytes=os.fstat(stream.fileno()).st_size)
    return sums


def _sha256(stream: FileIO, advance: Callable[[int], None] | None = None) -> str:
    """Compute the SHA-256 of a file; `advance` is called with the bytes of each block that is read."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(AT_ONCE))
    while count := stream.readinto(buffer):
        digest.update(buffer[:count])
        if advance is not None:
            advance(count)
    return digest.hexdigest()


def fault_of(
    folder: Path, expected: Mapping[str, FileSum], advance: Callable[[int], None] | None = None
) -> str | None:
    """Describe the first file that is missing, altered or can't be read; None if all files match `expected`.

    `advance` is called with the bytes of each block that is read.
    """
    for name, file_sum in expected.items():
        file = folder / name
        try:
            with open_plain(file) as stream:
                size = os.fstat(stream.fileno()).st_size
                if size != file_sum.bytes:
                    return f"{file} has {size:,} bytes, and {file_sum.bytes:,} were written"
                if _sha256(stream, advance) != file_sum.sha256:
                    return f"{file} is not what was written: its checksum differs"
        except FileNotFoundError:
            return f"{file} is missing"
        except OSError as error:
            return f"{file} can't be read: {error.strerror}"
        except CheckpointError as error:
            return str(error)
    return None


def fault_in_list(folder: Path, expected: Mapping[str, FileSum], holding: Iterable[str]) -> str | None:
    """Describe a file of a checkpoint without a sum: its index, one that holds tensors, one more than were written.

    `holding`: the files that hold tensors, by the index.
    """
    for name in (METADATA_FILE, *holding):
        if name not in expected:
            what = "" if name == METADATA_FILE else ", which holds tensors"
            return f"{folder / INFO_FILE} has no sum of {name}{what}"
    for path in sorted(folder.iterdir()):
        if _DATA.fullmatch(path.name) and path.name not in expected:
            return f"{path} is no file of this checkpoint: {INFO_FILE} has no sum of it"
    return None


UNFINISHED = ".saving"
_REPLACED = ".replaced"
_LEFT = re.compile(rf"(step-[0-9]{{1,15}})({re.escape(UNFINISHED)}|{re.escape(_REPLACED)})")
_DATA = re.compile(r"__\d+_\d+\.distcp")  # files with tensors
# Names of the files that PyTorch's writer and this package create in a checkpoint, temporary ones included.
_WRITTEN = re.compile(rf"{_DATA.pattern}|{re.escape(METADATA_FILE)}(\.tmp)?|{re.escape(INFO_FILE)}")


@dataclass(frozen=True, kw_only=True)
class FoundCheckpoint:
    """A checkpoint that is complete according to its name and its info; its files are not verified."""

    path: Path
    info: Info


def found_in(folder: Path) -> list[FoundCheckpoint]:
    """The complete checkpoints of a folder whose info can be read, by ascending step."""
    checkpoints: list[FoundCheckpoint] = []
    for step in steps_in(folder):
        path = folder / name_of(step)
        try:
            checkpoints.append(FoundCheckpoint(path=path, info=read_info(path)))
        except CheckpointError:
            continue
    return checkpoints


def all_candidates(place: Path) -> list[Path]:
    """The checkpoints that a path may mean, newest first, with those that have lost their info, which are damaged."""
    paths = candidates(place)
    if os.path.lexists(place / INFO_FILE):
        return paths
    folder = paths[0].parent if paths else place
    folder = folder if paths or not (place / CHECKPOINTS).is_dir() else place / CHECKPOINTS
    if not folder.is_dir():
        return paths
    lost = [path for path in folder.iterdir() if path not in paths and _has_lost_its_info(path)]
    return sorted([*paths, *lost], key=lambda path: step_of(path) or 0, reverse=True)


def _has_lost_its_info(path: Path) -> bool:
    """Whether a path has the name of a checkpoint, and no info, though it has files of one, or is no folder."""
    if step_of(path) is None:
        return False
    if not path.is_dir():  # something else stands in its place
        return True
    try:
        return any(_DATA.fullmatch(file.name) for file in path.iterdir())
    except OSError:
        return False


def remove_unfinished(folder: Path) -> None:
    """Remove the folders that an interrupted save left behind.

    Only folders are removed that have the name of an unfinished checkpoint and hold nothing but a checkpoint's files.
    """
    for path in _left_in(folder):
        shutil.rmtree(path)


def removable_in(folder: Path) -> list[Path]:
    """All checkpoints of a folder. Raises UserError for one that holds other files."""
    paths = [folder / name_of(step) for step in steps_in(folder)]
    for path in paths:
        if path.is_symlink() or not _is_of_a_checkpoint(path):
            raise UserError(f"{path} holds more than a checkpoint, and is not removed; move it away")
    return paths


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
        shutil.rmtree(replaced, ignore_errors=True)  # of an earlier try that failed
        path.rename(replaced)
    try:
        unfinished.rename(path)
    except OSError:
        if replaced.exists() and not path.exists():
            with suppress(OSError):
                replaced.rename(path)
        raise
    shutil.rmtree(replaced, ignore_errors=True)
    return path


def best_of(checkpoints: Sequence[FoundCheckpoint], metric: str, *, lowest: bool) -> FoundCheckpoint | None:
    """The checkpoint with the best value of a metric, the earliest among equals; None if none has the metric."""
    scored = [checkpoint for checkpoint in checkpoints if metric in checkpoint.info.metrics]
    if not scored:
        return None
    values = [checkpoint.info.metrics[metric] for checkpoint in scored]
    return scored[values.index(min(values) if lowest else max(values))]


def prune(*folders: Path, keep: int, best: Path | None = None) -> None:
    """Remove all checkpoints of some folders but the last `keep` of all and the best one."""
    steps = sorted((step, number) for number, folder in enumerate(folders) for step in steps_in(folder))
    for step, number in steps[:-keep]:
        path = folders[number] / name_of(step)
        if path != best:
            _remove(path)


def _remove(checkpoint: Path) -> None:
    """Remove a checkpoint: renamed first, so that a partly removed folder is never taken for one."""
    gone = checkpoint.with_name(checkpoint.name + _REPLACED)
    shutil.rmtree(gone, ignore_errors=True)  # of an earlier removal that failed
    checkpoint.rename(gone)
    shutil.rmtree(gone)
