"""Inspect checkpoints on disk: list those of a folder, list the tensors of one, verify its files."""

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from samestep.checkpoint.folder import all_candidates, fault_in_list, fault_of, unfinished_in
from samestep.checkpoint.info import Info, read_info, read_with_sum
from samestep.checkpoint.safe_index import entries, files_of, read_metadata
from samestep.errors import CheckpointError
from samestep.parallel.sharding import Entry
from samestep.run_folder import CHECKPOINTS, INFO_FILE

COMPLETE = "complete"
UNFINISHED = "unfinished"


@dataclass(frozen=True, kw_only=True)
class ListedCheckpoint:
    """A checkpoint in a folder, complete, unfinished or damaged."""

    path: Path
    state: str  # complete, unfinished, or the error found
    info: Info | None  # None if it can't be read
    bytes: int  # of all its files

    def to_json(self) -> dict[str, Any]:
        """Without the files' checksums and the hashes of data, of which there may be thousands."""
        info = {} if self.info is None else asdict(self.info)
        for long in ("files", "identity"):
            info.pop(long, None)
        return {"path": str(self.path), "state": self.state, "bytes": self.bytes, **info}


@dataclass(frozen=True, kw_only=True)
class CheckpointTensor:
    """A tensor of a checkpoint."""

    kind: str  # model, optimizer, random
    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int


def listed(place: Path) -> list[ListedCheckpoint]:
    """List the checkpoints under a path, the oldest step first, then the unfinished ones of interrupted saves.

    Tensor files are not read; `verify` verifies them. Raises CheckpointError if there are no checkpoints.
    """
    rows = [_listed(path) for path in reversed(all_candidates(place))]
    if not os.path.lexists(place / INFO_FILE):
        for folder in (place, place / CHECKPOINTS):
            rows += [_unfinished(path) for path in unfinished_in(folder)]
    if not rows:
        raise CheckpointError(
            f"{place} holds no checkpoint; use a run's folder, the one with its checkpoints, or a checkpoint"
            if place.exists()
            else f"there is no folder {place}"
        )
    return rows


def _listed(path: Path) -> ListedCheckpoint:
    """List one checkpoint; the state of a damaged one is the error."""
    try:
        return ListedCheckpoint(path=path, state=COMPLETE, info=read_info(path), bytes=_size(path))
    except CheckpointError as error:
        return ListedCheckpoint(path=path, state=str(error), info=None, bytes=_size(path))


def _unfinished(path: Path) -> ListedCheckpoint:
    return ListedCheckpoint(path=path, state=UNFINISHED, info=None, bytes=_size(path))


def sizes_in(path: Path) -> list[int]:
    """The bytes of each of a checkpoint's files; none where something else stands in the place of its folder."""
    return [file.lstat().st_size for file in path.iterdir() if file.is_file()] if path.is_dir() else []


def _size(path: Path) -> int:
    return sum(sizes_in(path))


@dataclass(frozen=True, kw_only=True)
class Verified:
    """What a look at all bytes of a checkpoint's files has shown."""

    fault: str | None  # the first one; None: all files match their checksums
    note: str | None = None  # of a checkpoint without a fault: what could not be compared

    def to_json(self) -> dict[str, str | None]:
        return asdict(self)


_NO_SUM = f"its {INFO_FILE} is of an earlier version, which wrote no sum of that file itself"


def verify(path: Path, advance: Callable[[int], None] | None = None) -> Verified:
    """Compare all files of a checkpoint with their checksums.

    `advance` is called with the bytes of each block that is read.
    """
    try:
        read = read_with_sum(path)
        files = read.info.files
        fault = fault_in_list(path, files, files_of(read_metadata(path))) or fault_of(path, files, advance)
    except CheckpointError as error:
        fault = str(error)
    except OSError as error:
        fault = f"{error.filename} can't be read: {error.strerror}"
    else:
        return Verified(fault=fault, note=None if read.has_sum or fault else _NO_SUM)
    return Verified(fault=fault)


def held_in(path: Path) -> list[CheckpointTensor]:
    """List the tensors of a checkpoint. Raises CheckpointError if its index can't be read."""
    held: list[CheckpointTensor] = []
    for name, entry in entries(read_metadata(path)).items():
        kind, _, rest = name.partition(".")
        held.append(held_as(kind, rest, entry))
    return held


def held_as(kind: str, name: str, entry: Entry) -> CheckpointTensor:
    """Make the row of a table for one tensor."""
    return CheckpointTensor(
        kind=kind,
        name=name,
        shape=tuple(entry.shape),
        dtype=str(entry.dtype).removeprefix("torch."),
        bytes=entry.shape.numel() * entry.dtype.itemsize,
    )
