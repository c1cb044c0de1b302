"""Inspect checkpoints on disk: list those of a folder, list the tensors of one, verify its files."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from samestep.checkpoint.folder import Info, fault_of, read_info, unfinished_in
from samestep.checkpoint.safe_index import METADATA_FILE, entries, read_metadata
from samestep.errors import CheckpointError
from samestep.parallel.sharding import Entry
from samestep.run_folder import CHECKPOINTS, INFO_FILE, candidates

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
        """Without the files' checksums, of which there may be thousands."""
        info = {} if self.info is None else asdict(self.info)
        info.pop("files", None)
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

    Tensor files are not read; `fault_in` verifies them. Raises CheckpointError if there are no checkpoints.
    """
    found = [_listed(path) for path in reversed(candidates(place))]
    if not (place / INFO_FILE).is_file():
        for folder in (place, place / CHECKPOINTS):
            found += [_unfinished(path) for path in unfinished_in(folder)]
    if not found:
        raise CheckpointError(
            f"{place} holds no checkpoint; use a run's folder, the one with its checkpoints, or a checkpoint"
            if place.exists()
            else f"there is no folder {place}"
        )
    return found


def _listed(path: Path) -> ListedCheckpoint:
    """List one checkpoint; the state of a damaged one is the error."""
    try:
        return ListedCheckpoint(path=path, state=COMPLETE, info=read_info(path), bytes=_size(path))
    except CheckpointError as error:
        return ListedCheckpoint(path=path, state=str(error), info=None, bytes=_size(path))


def _unfinished(path: Path) -> ListedCheckpoint:
    return ListedCheckpoint(path=path, state=UNFINISHED, info=None, bytes=_size(path))


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.iterdir() if file.is_file())


def fault_in(path: Path, advance: Callable[[int], None] | None = None) -> str | None:
    """Describe the first fault of a checkpoint; None if all of its files match their checksums.

    `advance` is called with the bytes of each block that is read.
    """
    try:
        info = read_info(path)
        if METADATA_FILE not in info.files:
            return f"{path / INFO_FILE} has no sum of {METADATA_FILE}"
        if fault := fault_of(path, info.files, advance):
            return fault
        index = read_metadata(path)
    except CheckpointError as error:
        return str(error)
    except OSError as error:
        return f"{error.filename} can't be read: {error.strerror}"
    for stored in index.storage_data.values():
        if stored.relative_path not in info.files:
            return f"{path / INFO_FILE} has no sum of {stored.relative_path}, which holds tensors"
    return None


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
