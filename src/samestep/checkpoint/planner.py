"""Pieces in PyTorch's distributed checkpoint: which boxes a rank writes, and which it wants to read.

PyTorch's planners put the boxes of all ranks together: what several ranks hold, one of them writes, and what a rank
wants is read from whichever boxes were written.
"""

import io
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import ReadItem, TensorWriteData, WriteItem, WriteItemType

from samestep.errors import CheckpointError
from samestep.parallel.sharding import Entry
from samestep.parallel.state_shards import MODEL, Box, Piece


class _Sharded:
    """A piece, in the form in which PyTorch's planners take tensors that they don't know."""

    def __init__(self, piece: Piece) -> None:
        self._piece = piece
        self._boxes = {box.offsets: box.values for box in piece.boxes}

    def size(self) -> torch.Size:
        return self._piece.shape

    def at(self, index: MetadataIndex) -> Tensor:
        return self._boxes[tuple(index.offset or ())]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_chunk(box) for box in self._piece.boxes]

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        """PyTorch asks this of a tensor of its own kinds: one item for each box."""
        return [
            WriteItem(
                index=MetadataIndex(fqn, box.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=_chunk(box),
                    properties=TensorProperties(dtype=self._piece.dtype),
                    size=self._piece.shape,
                ),
            )
            for box in self._piece.boxes
        ]


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=box.values.shape)


class SavePlanner(DefaultSavePlanner):
    """Plans to write pieces."""

    def __init__(self, pieces: Mapping[str, Piece]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._pieces = pieces

    def set_up_planner(
        self, state_dict: Any, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Pieces in place of a state dict: PyTorch's planner puts those of all ranks together."""
        sharded = {name: _Sharded(piece) for name, piece in self._pieces.items()}
        super().set_up_planner(sharded, storage_meta, is_coordinator)

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].at(index)


class _Unread:
    """A whole tensor of which the shape and the type are known, in the form that PyTorch's planners take."""

    def __init__(self, entry: Entry) -> None:
        self._entry = entry

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        start = torch.Size([0] * len(self._entry.shape))
        return [
            WriteItem(
                index=MetadataIndex(fqn, start),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offsets=start, sizes=self._entry.shape),
                    properties=TensorProperties(dtype=self._entry.dtype),
                    size=self._entry.shape,
                ),
            )
        ]


class StreamPlanner(DefaultSavePlanner):
    """Plans to write a model's tensors whole, each of which is read when it is written.

    They stand in a section of their own, as PyTorch's planner has nested state dicts; so its index tells their names.
    """

    def __init__(self, entries: Mapping[str, Entry], read: Callable[[str], Tensor]) -> None:
        super().__init__(flatten_sharded_tensors=False)
        self._entries = entries
        self._read = read

    def set_up_planner(
        self, state_dict: Any, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Entries in place of tensors: values are given one at a time, when they are written."""
        unread = {name: _Unread(entry) for name, entry in self._entries.items()}
        super().set_up_planner({MODEL.removesuffix("."): unread}, storage_meta, is_coordinator)

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self._read(index.fqn.removeprefix(MODEL))


class LoadPlanner(DefaultLoadPlanner):
    """Plans to read pieces, into the memory of their boxes."""

    def __init__(self, pieces: Mapping[str, Piece]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._pieces = pieces

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """Pieces to fill, and what the checkpoint holds."""
        self.state_dict: Any = {name: _Sharded(piece) for name, piece in self._pieces.items()}
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].at(index)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        # They would be unpickled, and a pickle can run code.
        raise CheckpointError(f"{read_item.dest_index.fqn} is an object, not a tensor; objects are not loaded")
