"""Planners for PyTorch's distributed checkpoint: which boxes of which tensors a rank writes and reads.

PyTorch's planners combine the boxes of all ranks: one of the ranks that hold a box writes it, and a box to read is
assembled from the saved boxes that overlap it.
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
    """Adapter of a piece to the protocol of PyTorch's planners for custom sharded tensors."""

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
        """PyTorch's planner calls this: one write item for each box."""
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


class _OfPieces:
    """This rank's pieces in place of a state dict, as a base class before one of PyTorch's planners."""

    def __init__(self, pieces: Mapping[str, Piece]) -> None:
        # Names and boxes are the pieces' own: there is nothing to flatten.
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)  # pyright: ignore[reportCallIssue]
        self._sharded = {name: _Sharded(piece) for name, piece in pieces.items()}

    def _box(self, index: MetadataIndex) -> Tensor:
        """The values of the box that PyTorch's planner writes or reads."""
        return self._sharded[index.fqn].at(index)


class SavePlanner(_OfPieces, DefaultSavePlanner):
    """Plans the writing of this rank's pieces."""

    def set_up_planner(
        self, state_dict: Any, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Plan the pieces in place of a state dict; PyTorch's planner combines those of all ranks."""
        super().set_up_planner(self._sharded, storage_meta, is_coordinator)

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self._box(index)


class _Unread:
    """Adapter of an unsharded tensor that isn't read yet: shape and dtype, in the protocol of PyTorch's planners."""

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
    """Plans the writing of a model's unsharded tensors, each of which is read just before it is written.

    They are nested under the key `model`, so that PyTorch's index holds their names as of a nested state dict.
    """

    def __init__(self, entries: Mapping[str, Entry], read: Callable[[str], Tensor]) -> None:
        super().__init__(flatten_sharded_tensors=False)
        self._entries = entries
        self._read = read

    def set_up_planner(
        self, state_dict: Any, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Plan entries in place of tensors; `lookup_object` reads each tensor when it is written."""
        unread = {name: _Unread(entry) for name, entry in self._entries.items()}
        super().set_up_planner({MODEL.removesuffix("."): unread}, storage_meta, is_coordinator)

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self._read(index.fqn.removeprefix(MODEL))


class LoadPlanner(_OfPieces, DefaultLoadPlanner):
    """Plans the reading of pieces into the memory of their boxes."""

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """Take the pieces to fill in place of a state dict, and the checkpoint's metadata."""
        self.state_dict: Any = self._sharded
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._box(index)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        # Objects would be unpickled, and a pickle can run code.
        raise CheckpointError(f"{read_item.dest_index.fqn} is an object, not a tensor; objects are not loaded")
