"""Loading: hold a checkpoint's files against their sums, and read what this rank holds from whoever wrote it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from samestep.checkpoint.info import Info, read_info
from samestep.checkpoint.metadata import Reader, entries, read_metadata
from samestep.checkpoint.plans import LoadPlanner
from samestep.checkpoint.sums import fault_of
from samestep.errors import CheckpointError
from samestep.parallel.parts import Entry
from samestep.parallel.pieces import Piece


class Loader:
    """A checkpoint that is to be read; every rank has one and calls it alike, with a group of all on the CPU."""

    def __init__(self, folder: Path, group: dist.ProcessGroup) -> None:
        self.folder = folder
        self._group = group
        self.info: Info = read_info(folder)
        self.entries: Mapping[str, Entry] = entries(read_metadata(folder))

    def verify(self) -> None:
        """Compare every file with its sum, each rank a part of them. Raises CheckpointError on all ranks."""
        rank, ranks = dist.get_rank(), dist.get_world_size()
        mine = dict(sorted(self.info.files.items())[rank::ranks])
        faults: list[Any] = [None] * ranks
        dist.all_gather_object(faults, fault_of(self.folder, mine), group=self._group)
        for fault in faults:
            if fault is not None:
                raise CheckpointError(f"checkpoint {self.folder} is damaged: {fault}")

    def check(self, wanted: Mapping[str, Entry]) -> None:
        """Raise CheckpointError unless the checkpoint holds these tensors, in these shapes and types."""
        for name, entry in wanted.items():
            found = self.entries.get(name)
            if found is None:
                raise CheckpointError(f"checkpoint {self.folder} has no {name}, and the job's model has")
            if found != entry:
                raise CheckpointError(
                    f"checkpoint {self.folder}: {name} is {_shown(found)}, and the job's model has {_shown(entry)}"
                )
        kinds = {name.partition(".")[0] + "." for name in wanted}
        for name in self.entries:
            if name not in wanted and name.partition(".")[0] + "." in kinds:
                raise CheckpointError(f"checkpoint {self.folder} holds {name}, and the job's model has none")

    def read(self, pieces: Mapping[str, Piece]) -> None:
        """Read pieces into the memory of their boxes. Raises CheckpointError where they can't be."""
        try:
            dcp.load(
                {},
                storage_reader=Reader(self.folder),
                planner=LoadPlanner(pieces),
                process_group=self._group,
            )
        except CheckpointException as error:
            rank = min(error.failures)
            cause = error.failures[rank][0]
            if isinstance(cause, CheckpointError):
                raise cause from None
            raise CheckpointError(f"checkpoint {self.folder} can't be read by rank {rank}: {cause!r}") from None

    def random_state(self, rank: int) -> torch.Tensor | None:
        """Memory for the random state that a rank saved; None where it saved none."""
        entry = self.entries.get(f"random.{rank}")
        return None if entry is None else torch.zeros(entry.shape, dtype=entry.dtype)


def _shown(entry: Entry) -> str:
    return f"{list(entry.shape)} of {str(entry.dtype).removeprefix('torch.')}"
