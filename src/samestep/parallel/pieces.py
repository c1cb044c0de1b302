"""Pieces: what a rank holds of a tensor of the whole training, as boxes that know their place in the whole.

They are the common language of layouts: what was saved as the boxes of one layout is read as those of another.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from samestep.parallel.parts import Entry, Part, Parts, Slice, local

MODEL = "model."


@dataclass(frozen=True, kw_only=True)
class Box:
    """A rectangular part of a tensor."""

    offsets: tuple[int, ...]  # where it begins in the whole
    values: Tensor  # a view of this rank's memory


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What a rank holds of a tensor."""

    shape: torch.Size  # of the whole
    dtype: torch.dtype
    boxes: Sequence[Box]


@dataclass(frozen=True, kw_only=True)
class _Span:
    """Consecutive rows (or columns, ...) that lie together in the whole and in memory alike."""

    whole: int  # the first one's index in the whole
    memory: int  # and in this rank's memory
    length: int

    def within(self, start: int, length: int) -> "_Span":
        """What of it lies between two indices of the memory, where the memory begins at `start`."""
        first, last = max(self.memory, start), min(self.memory + self.length, start + length)
        return _Span(whole=self.whole + first - self.memory, memory=first - start, length=max(0, last - first))


def whole_piece(tensor: Tensor) -> Piece:
    """The piece of a tensor that every rank holds whole."""
    return piece_of(tensor, Part(), tensor.shape)


def piece_of(tensor: Tensor, part: Part, shape: torch.Size, memory: Tensor | None = None) -> Piece:
    """The piece that a rank's tensor is: all of a whole of this shape, a slice of it, or a shard of either.

    `memory`: other numbers of the same place, such as an optimizer's state of a shard.
    """
    memory = local(tensor.detach()) if memory is None else memory
    boxes = [Box(offsets=place.offsets, values=memory[place.memory]) for place in places_of(tensor, part, shape)]
    return Piece(shape=shape, dtype=memory.dtype, boxes=boxes)


@dataclass(frozen=True, kw_only=True)
class Placed:
    """Where numbers that lie together in the whole are in this rank's memory."""

    offsets: tuple[int, ...]  # where they begin in the whole
    memory: tuple[slice, ...]
    sizes: tuple[int, ...]


def places_of(tensor: Tensor, part: Part, shape: torch.Size) -> list[Placed]:
    """The boxes of the whole that a rank's tensor is, and where it has them."""
    spans = [[_Span(whole=0, memory=0, length=length)] for length in shape]
    if part.slice is not None:
        spans[part.slice.dim] = _spans_of(part.slice)
    if isinstance(tensor, DTensor):
        (chunk,) = tensor.__create_chunk_list__()  # where this rank's shard lies in the slice
        spans = [
            [span.within(start, length) for span in along]
            for along, start, length in zip(spans, chunk.offsets, chunk.sizes, strict=True)
        ]
    return [
        Placed(
            offsets=tuple(span.whole for span in box),
            memory=tuple(slice(span.memory, span.memory + span.length) for span in box),
            sizes=tuple(span.length for span in box),
        )
        for box in product(*spans)
        if all(span.length for span in box)
    ]


def _spans_of(part: Slice) -> list[_Span]:
    spans: list[_Span] = []
    memory = 0
    for first, last in part.mine:
        spans.append(_Span(whole=first, memory=memory, length=last - first))
        memory += last - first
    return spans


def model_pieces(model: nn.Module, parts: Parts) -> dict[str, Piece]:
    """What this rank holds of the model: `model.<name>` for every parameter once, and every buffer that is state."""
    return {
        MODEL + name: piece_of(tensor, parts.part(name), entry.shape) for name, entry, tensor in _held(model, parts)
    }


def model_entries(parts: Parts) -> dict[str, Entry]:
    """The whole model's tensors, by the same names."""
    return {MODEL + name: entry for name, entry in {**parts.buffers(), **parts.parameters}.items()}


def _held(model: nn.Module, parts: Parts) -> Iterator[tuple[str, Entry, Tensor]]:
    mine: Mapping[str, Any] = {**model.state_dict(), **dict(model.named_parameters())}
    for name, entry in {**parts.parameters, **parts.buffers()}.items():
        if parts.holds(name):
            yield name, entry, mine[name]
