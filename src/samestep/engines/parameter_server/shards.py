"""Shards: all trained parameters as one sequence of elements, of which each server has one range."""

import math
import mmap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from samestep.errors import UserError
from samestep.parallel.state_shards import Box, Piece


@dataclass(frozen=True, kw_only=True)
class Span:
    """A parameter's range of the sequence."""

    name: str
    shape: torch.Size
    start: int
    stop: int
    table: bool  # an embedding table, whose gradient may be sparse; it is only cut between rows

    @property
    def row(self) -> int:
        """Elements of a row."""
        return math.prod(self.shape[1:])


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """The part of a parameter that a server holds."""

    span: Span
    first: int  # index of the first element in the parameter
    last: int  # one past the last
    offset: int  # where it begins in the server's shard

    @property
    def elements(self) -> int:
        return self.last - self.first

    @property
    def whole(self) -> bool:
        return self.elements == self.span.stop - self.span.start

    @property
    def shape(self) -> torch.Size:
        """The shape that the optimizer steps: the parameter's, or a single row for a part of a parameter.

        It has the parameter's number of dimensions, on which weight decay depends.
        """
        dims = len(self.span.shape)
        return self.span.shape if self.whole else torch.Size([1] * (dims - 1) + [self.elements])

    @property
    def at(self) -> slice:
        """Of the server's shard."""
        return slice(self.offset, self.offset + self.elements)

    def piece(self, values: Tensor) -> Piece:
        """What `values`, of the chunk's shape, are of the whole parameter."""
        flat, begin, parts = values.detach().reshape(-1), 0, []
        for offsets, shape in boxes(self.span.shape, self.first, self.last):
            end = begin + math.prod(shape)
            parts.append(Box(offsets=offsets, values=flat[begin:end].view(shape)))
            begin = end
        return Piece(shape=self.span.shape, dtype=values.dtype, boxes=parts)


def spans_of(model: nn.Module) -> list[Span]:
    """The trained parameters one after the other, in the model's order. Raises UserError for several dtypes."""
    tables = {id(m.weight) for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))}
    spans: list[Span] = []
    start, first = 0, None
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad or not parameter.numel():
            continue
        first = first or (name, parameter.dtype)
        if parameter.dtype != first[1]:
            raise UserError(
                f'engine "parameter-server": {name} is {parameter.dtype} and {first[0]} {first[1]}; '
                "use parameters of one dtype, or engine native"
            )
        stop = start + parameter.numel()
        spans.append(Span(name=name, shape=parameter.shape, start=start, stop=stop, table=id(parameter) in tables))
        start = stop
    return spans


def bounds_of(spans: Sequence[Span], servers: int) -> list[int]:
    """The start of each server's range, and the end of the last. Raises UserError if a server would have no element.

    Each range has total / servers elements, to one element; a cut inside an embedding table moves to the nearest row.
    """
    cuts = _cuts(spans, servers)
    if not _all_have_some(cuts):
        most = next((fewer for fewer in range(servers - 1, 1, -1) if _all_have_some(_cuts(spans, fewer))), 1)
        raise UserError(
            f"servers is {servers}, and the model's {len(spans)} trained parameters ({cuts[-1]:,} elements) leave "
            f"one of them without any; use servers: {most}"
        )
    return cuts


def _cuts(spans: Sequence[Span], servers: int) -> list[int]:
    total = spans[-1].stop if spans else 0
    cuts = [0]
    for server in range(1, servers):
        cut = round(total * server / servers)
        for span in spans:
            if span.table and span.start < cut < span.stop:
                cut = span.start + round((cut - span.start) / span.row) * span.row
        cuts.append(cut)
    return [*cuts, total]


def _all_have_some(cuts: Sequence[int]) -> bool:
    return all(after > before for before, after in pairwise(cuts))


def chunks_of(spans: Sequence[Span], start: int, stop: int) -> list[Chunk]:
    """What a server with this range of the sequence holds of each parameter."""
    chunks = []
    for span in spans:
        first, last = max(start, span.start), min(stop, span.stop)
        if first < last:
            chunks.append(Chunk(span=span, first=first - span.start, last=last - span.start, offset=first - start))
    return chunks


def boxes(shape: Sequence[int], first: int, last: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Split the range `first` to `last` of a tensor's elements into boxes, in memory order: (offsets, shape) of each.

    A range is a part of a row, whole rows, and a part of a row, recursively; each of them may be empty.
    """
    if not shape:
        yield (), ()
        return
    row = math.prod(shape[1:])
    number = first // row
    if first % row or last < (number + 1) * row:
        end = min(last, (number + 1) * row)
        for offsets, lengths in boxes(shape[1:], first - number * row, end - number * row):
            yield (number, *offsets), (1, *lengths)
        first, number = end, number + 1
    if (full := last // row) > number:
        yield (number, *(0 for _ in shape[1:])), (full - number, *shape[1:])
        first = full * row
    if first < last:
        yield from boxes(shape, first, last)


def shared_empty(elements: int, dtype: torch.dtype) -> Tensor:
    """A CPU tensor [elements] in memory that this process shares with those that it forks.

    The memory is anonymous: it needs no file in /dev/shm, whose size is often limited, and can't be left behind.
    """
    if not elements:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(mmap.mmap(-1, elements * dtype.itemsize), dtype=dtype, count=elements)


class FlatParameters:
    """A model's trained parameters in one flat tensor, in which each server's shard is a range.

    A worker receives parameters straight into it, and a server's optimizer steps its range in place.
    """

    def __init__(self, model: nn.Module, servers: int, *, shared: bool = False) -> None:
        """Make the model's parameters views of one tensor. `shared`: with processes that this one forks."""
        self.spans = spans_of(model)
        self._bounds = bounds_of(self.spans, servers)
        parameters = dict(model.named_parameters())
        self.parameters: Mapping[str, nn.Parameter] = {span.name: parameters[span.name] for span in self.spans}
        like = next(iter(self.parameters.values()))
        elements = self._bounds[-1]
        self.values = (
            shared_empty(elements, like.dtype)
            if shared
            else torch.empty(elements, dtype=like.dtype, device=like.device)
        )
        for span in self.spans:
            place = self.values[span.start : span.stop].view(span.shape)
            place.copy_(self.parameters[span.name].detach())
            self.parameters[span.name].data = place
        self.chunks: Sequence[Sequence[Chunk]] = [  # of each server
            chunks_of(self.spans, start, stop) for start, stop in pairwise(self._bounds)
        ]

    def shard(self, server: int) -> Tensor:
        """A server's range, in this memory."""
        return self.values[self._bounds[server] : self._bounds[server + 1]]
