"""Messages between workers and servers: a push with a worker's gradient of one shard, a reply with its parameters.

Point-to-point over a gloo group of their own. A push is a header, the numbers of touched rows if there are any, and
values; the header tells how many. A reply is a header and the shard's parameters. A worker whose process has died
pushes headers alone (`PushKind`).
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.engines.parameter_server.shards import Chunk

_HEADER, _ROWS, _VALUES, _REPLY, _PARAMETERS = range(1, 6)  # tags

# Of a chunk, in a push's header: no gradient at all, a whole one, or else the number of rows.
_UNUSED, _DENSE = -2, -1
_INDEX_BYTES = 8


class PushKind(IntEnum):
    """The kind of a push. All but GRADIENT are sent for workers whose process has died, without a gradient."""

    GRADIENT = 0  # a gradient; the reply has the parameters, once the staleness bound allows the next step
    AWAY = 1  # servers must not wait for the worker from now on; no reply
    MISSED = 2  # the worker skips its samples of this step; the reply is a header, sent at once
    LOST = 3  # as MISSED, by a worker that won't return; the reply is a header, sent when no other rank is behind it
    BACK = 4  # the worker computes again; the reply has the parameters, sent at once


@dataclass(frozen=True, kw_only=True)
class PushHeader:
    """The header of a push: a worker's figures of its part of a step."""

    loss: float  # sum over its samples
    count: float  # of the loss's terms
    samples: float
    global_samples: float
    norm: float  # of its own mean gradient, before clipping; only for asynchronous workers
    stop_at: float  # the step from which on all ranks report a loss of NaN; infinite: none
    kind: float = PushKind.GRADIENT


@dataclass(frozen=True, kw_only=True)
class ReplyHeader:
    """The header of a reply: a server's figures of the step."""

    loss: float
    norm: float
    stop_at: float
    slowest: float = 0.0  # steps of the slowest worker that is present; only for asynchronous workers


_FIELDS = len(PushHeader.__dataclass_fields__)


class Push:
    """A worker's gradient of one server's shard, ready to be sent."""

    def __init__(self, chunks: Sequence[Chunk], gradients: Sequence[Tensor | None], *, sparse: bool) -> None:
        """`gradients`: of the whole parameters to which the chunks belong; None: unused."""
        kinds: list[int] = []
        rows: list[Tensor] = []
        values: list[Tensor] = []
        for chunk, gradient in zip(chunks, gradients, strict=True):
            if gradient is None:
                kinds.append(_UNUSED)
                continue
            part = gradient.reshape(-1)[chunk.first : chunk.last]
            touched = _touched(chunk, part) if sparse and chunk.span.table else None
            kinds.append(_DENSE if touched is None else len(touched))
            if touched is not None:
                rows.append(touched)
                part = part.view(-1, chunk.span.row)[touched].reshape(-1)
            values.append(part)
        self.kinds = torch.tensor(kinds, dtype=torch.float64)
        self.rows = torch.cat(rows).cpu() if rows else None
        self.values = torch.cat(values).cpu() if values else None

    def scale(self, factor: float) -> None:
        if self.values is not None:
            self.values *= factor


def _touched(chunk: Chunk, part: Tensor) -> Tensor | None:
    """The indices of a table's nonzero gradient rows; None if a dense message has no more bytes."""
    by_row = part.view(-1, chunk.span.row)
    touched = by_row.any(dim=1).nonzero().view(-1)
    row_bytes = chunk.span.row * part.element_size()
    return touched if len(touched) * (row_bytes + _INDEX_BYTES) < len(by_row) * row_bytes else None


class Pushed:
    """A received push."""

    def __init__(
        self, facts: PushHeader, chunks: Sequence[Chunk], kinds: Sequence[int], rows: Tensor, values: Tensor
    ) -> None:
        self.facts = facts
        self._chunks = chunks
        self._kinds = kinds
        self._rows = rows
        self._values = values

    @property
    def used(self) -> list[bool]:
        """For each chunk, whether the worker has a gradient of it."""
        return [kind != _UNUSED for kind in self._kinds]

    def add_to(self, gradient: Tensor) -> None:
        """Add the pushed gradient to the shard's flat gradient [elements]."""
        rows, values = 0, 0
        for chunk, kind in zip(self._chunks, self._kinds, strict=True):
            if kind == _UNUSED:
                continue
            count = chunk.elements if kind == _DENSE else kind * chunk.span.row
            part = self._values[values : values + count].to(gradient.device)
            values += count
            place = gradient[chunk.at]
            if kind == _DENSE:
                place += part
                continue
            index = self._rows[rows : rows + kind].to(gradient.device)
            rows += kind
            place.view(-1, chunk.span.row).index_add_(0, index, part.view(kind, chunk.span.row))


class PointToPoint:
    """Sends and receives on one rank. Tensors on an accelerator pass through the host's memory."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._pending: list[tuple[Any, Tensor]] = []  # keeps sent tensors alive until they have arrived

    def push(self, server: int, facts: PushHeader, push: Push) -> None:
        self._send(torch.cat([torch.tensor(astuple(facts), dtype=torch.float64), push.kinds]), server, _HEADER)
        if push.rows is not None and len(push.rows):
            self._send(push.rows, server, _ROWS)
        if push.values is not None and len(push.values):
            self._send(push.values, server, _VALUES)

    def receive_push(self, chunks: Sequence[Chunk], dtype: torch.dtype, worker: int | None) -> tuple[int, Pushed]:
        """Receive the next push of a worker, or with None of any worker. Returns the sender's rank and the push."""
        header = torch.empty(_FIELDS + len(chunks), dtype=torch.float64)
        source = dist.recv(header, src=worker, group=self._group, tag=_HEADER)
        facts = PushHeader(**dict(zip(PushHeader.__dataclass_fields__, header[:_FIELDS].tolist(), strict=True)))
        kinds = [int(kind) for kind in header[_FIELDS:].tolist()]
        rows = torch.empty(sum(max(0, kind) for kind in kinds), dtype=torch.int64)
        counts = [_elements(chunk, kind) for chunk, kind in zip(chunks, kinds, strict=True)]
        values = torch.empty(sum(counts), dtype=dtype)
        if len(rows):
            dist.recv(rows, src=source, group=self._group, tag=_ROWS)
        if len(values):
            dist.recv(values, src=source, group=self._group, tag=_VALUES)
        return source, Pushed(facts, chunks, kinds, rows, values)

    def reply(self, worker: int, answer: ReplyHeader, parameters: Tensor | None) -> None:
        self._send(torch.tensor(astuple(answer), dtype=torch.float64), worker, _REPLY)
        if parameters is not None:
            self._send(parameters, worker, _PARAMETERS)

    def receive_headers(self, servers: Sequence[int]) -> list[ReplyHeader]:
        """Receive a reply without parameters from each server."""
        headers = [torch.empty(len(ReplyHeader.__dataclass_fields__), dtype=torch.float64) for _ in servers]
        for server, header in zip(servers, headers, strict=True):
            dist.recv(header, src=server, group=self._group, tag=_REPLY)
        return [_answer(header) for header in headers]

    def receive_replies(self, servers: Sequence[int], shards: Sequence[Tensor]) -> list[ReplyHeader]:
        """Receive a reply from each server, with its parameters into its shard."""
        headers = [torch.empty(len(ReplyHeader.__dataclass_fields__), dtype=torch.float64) for _ in servers]
        hosts = [shard if shard.device.type == "cpu" else torch.empty_like(shard, device="cpu") for shard in shards]
        waiting: list[Any] = []
        for server, header, host in zip(servers, headers, hosts, strict=True):
            waiting.append(dist.irecv(header, src=server, group=self._group, tag=_REPLY))
            waiting.append(dist.irecv(host, src=server, group=self._group, tag=_PARAMETERS))
        for work in waiting:
            work.wait()
        for shard, host in zip(shards, hosts, strict=True):
            if host is not shard:
                shard.copy_(host)
        return [_answer(header) for header in headers]

    def _send(self, tensor: Tensor, to: int, tag: int) -> None:
        host = tensor.detach().cpu()
        self._pending.append((dist.isend(host, dst=to, group=self._group, tag=tag), host))

    def wait(self) -> None:
        """Wait until all sends are complete, so that their tensors may be overwritten."""
        for work, _ in self._pending:
            work.wait()
        self._pending.clear()


def _answer(header: Tensor) -> ReplyHeader:
    return ReplyHeader(**dict(zip(ReplyHeader.__dataclass_fields__, header.tolist(), strict=True)))


def _elements(chunk: Chunk, kind: int) -> int:
    """Values of a chunk in a push."""
    if kind == _UNUSED:
        return 0
    return chunk.elements if kind == _DENSE else kind * chunk.span.row
