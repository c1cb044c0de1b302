"""Loading: find the newest checkpoint whose files match their checksums, and read the shards that this rank holds.

The layout that wrote a checkpoint may differ from the one that reads it.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from samestep.checkpoint.folder import all_candidates, fault_in_list, fault_of
from samestep.checkpoint.info import Info, read_info
from samestep.checkpoint.planner import LoadPlanner
from samestep.checkpoint.safe_index import SafeReader, entries, files_of, read_metadata, refusal
from samestep.errors import CheckpointError
from samestep.parallel.sharding import Entry
from samestep.parallel.state_shards import MODEL, Piece
from samestep.run_folder import candidates, step_of


class CheckpointLoader:
    """Reads one checkpoint; every rank has a loader and makes the same calls.

    `group`: a CPU group of all ranks. `summed`: whether the checkpoint has sums of its files; copies in memory have
    none. Raises CheckpointError where the info or the index is damaged.
    """

    def __init__(self, folder: Path, group: dist.ProcessGroup, *, summed: bool = True) -> None:
        self.folder = folder
        self.group = self._group = group
        self.info: Info = read_info(folder)
        index = read_metadata(folder)
        if summed and (fault := fault_in_list(folder, self.info.files, files_of(index))):
            raise CheckpointError(f"checkpoint {folder} is damaged: {fault}")
        self.entries: Mapping[str, Entry] = entries(index)
        self._names: Mapping[str, str] = {}  # the job's name of a tensor -> its name in the checkpoint

    def verify(self) -> None:
        """Verify the files' checksums, with the files dealt out to the ranks. Raises CheckpointError on all ranks."""
        rank, ranks = dist.get_rank(), dist.get_world_size()
        own_files = dict(sorted(self.info.files.items())[rank::ranks])
        faults: list[Any] = [None] * ranks
        dist.all_gather_object(faults, fault_of(self.folder, own_files), group=self._group)
        for fault in faults:
            if fault is not None:
                raise CheckpointError(f"checkpoint {self.folder} is damaged: {fault}")

    def check(self, entries: Mapping[str, Entry], tied: Mapping[str, str]) -> None:
        """Raise CheckpointError unless the checkpoint holds these tensors, in these shapes and types.

        `tied`: further names of the model's tied parameters; a checkpoint may hold such a parameter under any name.
        """
        others = {MODEL + other: MODEL + name for other, name in tied.items()}
        self._names = {name: other for other, name in others.items() if other in self.entries}
        self._names |= {name: name for name in entries if name in self.entries}
        for name, entry in entries.items():
            entry_here = self.entries.get(self._names.get(name, name))
            if entry_here is None:
                raise CheckpointError(f"checkpoint {self.folder} has no {name}, and the job's model has")
            if entry_here != entry:
                remedy = f"; samestep checkpoint convert --dtype {_name(entry.dtype)} makes it so"
                raise CheckpointError(
                    f"checkpoint {self.folder}: {name} is {_shown(entry_here)}, and the job's model has "
                    f"{_shown(entry)}" + (remedy if entry_here.shape == entry.shape else "")
                )
        kinds = {name.partition(".")[0] + "." for name in entries}
        for name in self.entries:
            if name not in entries and name not in others and name.partition(".")[0] + "." in kinds:
                raise CheckpointError(f"checkpoint {self.folder} holds {name}, and the job's model has none")

    def read(self, pieces: Mapping[str, Piece]) -> None:
        """Read pieces into the memory of their boxes. Raises CheckpointError if one can't be read."""
        try:
            dcp.load(
                {},
                storage_reader=SafeReader(self.folder),
                planner=LoadPlanner({self._names.get(name, name): piece for name, piece in pieces.items()}),
                process_group=self._group,
            )
        except CheckpointException as error:
            rank = min(error.failures)
            cause = error.failures[rank][0]
            if isinstance(cause, CheckpointError):
                raise cause from None
            raise CheckpointError(
                f"checkpoint {self.folder} can't be read by rank {rank}: {refusal(cause)}"
            ) from None

    def random_state(self, rank: int) -> torch.Tensor | None:
        """An empty tensor for the random state that a rank saved; None if the checkpoint has none."""
        entry = self.entries.get(f"random.{rank}")
        return None if entry is None else torch.zeros(entry.shape, dtype=entry.dtype)


def _shown(entry: Entry) -> str:
    return f"{list(entry.shape)} of {_name(entry.dtype)}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def open_newest(
    places: Sequence[Path], group: dist.ProcessGroup, warn: Callable[[str], None], *, summed: bool = True
) -> CheckpointLoader | None:
    """Open the newest undamaged checkpoint under some paths; None if there are no checkpoints.

    `warn` is called for each damaged one with another before it. `summed` is as for the loader: copies in memory
    without info are no longer valid, and no damage. Every rank must ask. Raises CheckpointError if all are damaged.
    """
    # Relative paths, since hosts may mount the folder at different paths.
    listed: list[Any] = [_listed(places, summed=summed) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(listed, src=0, group=group)
    names, unreadable = listed[0]
    if unreadable and not names:
        raise CheckpointError(f"{unreadable[0]}; nothing tells whether a checkpoint is there")
    for reason in unreadable:
        warn(f"{reason}; the checkpoints of the other folder are taken")
    paths = [places[number] / name for number, name in names]
    fault = ""
    for path in paths:
        loader, fault = _opened(path, group, summed=summed)
        if loader is not None:
            return loader
        if len(paths) == 1:
            raise CheckpointError(f"{fault}; there is no other in {path.parent}")
        if path is not paths[-1]:
            warn(f"{fault}; the one before it is tried")
    if paths:
        raise CheckpointError(f"all {len(paths)} checkpoints in {paths[0].parent} are damaged; the last: {fault}")
    return None


def _listed(places: Sequence[Path], *, summed: bool) -> tuple[list[tuple[int, str]], list[str]]:
    """List the checkpoints under some paths, newest first, as (number of the path, path below it); and what can't be.

    Of equal steps that of the earlier path comes first.
    """
    steps: list[tuple[int, int, str]] = []
    unreadable: list[str] = []
    for number, place in enumerate(places):
        try:
            here = all_candidates(place) if summed else candidates(place)
        except OSError as error:
            unreadable.append(f"{place} can't be read: {error.strerror}")
            continue
        steps += [(-(step_of(path) or 0), number, os.path.relpath(path, place)) for path in here]
    return [(number, name) for _, number, name in sorted(steps)], unreadable


def _opened(path: Path, group: dist.ProcessGroup, *, summed: bool) -> tuple[CheckpointLoader | None, str]:
    """Open and verify a checkpoint: its loader, or None and the fault, the same on every rank."""
    loader: CheckpointLoader | None = None
    fault: str | None = None
    try:
        loader = CheckpointLoader(path, group, summed=summed)
    except CheckpointError as error:
        fault = str(error)
    faults: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(faults, fault, group=group)
    if loader is not None and not any(faults):
        try:
            loader.verify()
            return loader, ""
        except CheckpointError as error:  # the same on all ranks
            faults = [str(error)]
    return None, next(fault for fault in faults if fault is not None)
