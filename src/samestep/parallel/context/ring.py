"""Ring attention: keys and values travel from rank to rank, and each rank's queries stay.

The source: Liu et al. 2023, arXiv 2310.01889, section 3.

A rank holds its own tokens' queries, keys and values, and the keys and values of one other rank at a time, so that
what attention needs falls with the number of ranks; heads need not be divisible. While a rank computes with the keys
that it has, it sends them on and receives the next. What queries gave for the keys of each rank is put together by
the log-sum-exp of their scores. In backward keys and values go round again, and with them the sums of their
gradients.

Tokens are shared out in a zigzag (see `shares.Shares`), so that under a causal mask all ranks have as much to do:
half of the queries or half of the keys of each further rank.

PyTorch's own ring (torch.distributed.tensor.experimental, as of 2.13) is not used. It takes no masks and no numbers
of tokens that the ranks don't divide, has no rule for attention on CPUs, adds up in float32 whatever the precision,
so that nothing could be proved in float64, and is switched on for a whole process.

One step of a ring of 4, forward (k0 are the keys and values of rank 0's tokens):

    step      0     1     2     3
    rank 0    k0    k3    k2    k1       sends to rank 1, receives from rank 3
    rank 1    k1    k0    k3    k2

Messages of a step are posted before its computation and waited for after it; the last step sends nothing. In backward
the sums of gradients travel one step behind the keys that they are of, and take one more step to get home.
`batch_isend_irecv` posts send and receive together, so that two ranks that send to each other don't block.
"""

# PyTorch's stub of backward takes any number of gradients, and its mark of one that is taken once knows no ctx.
# pyright: reportIncompatibleMethodOverride=false

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from samestep.errors import LayoutError
from samestep.layout import Layout
from samestep.parallel.calls import Trace
from samestep.parallel.context.block_attention import (
    Attended,
    KeyValueBlock,
    additive,
    attend,
    exact_dtype,
    gradients,
    merge,
)
from samestep.parallel.context.shares import Shares, own_part

WITHOUT_DROPOUT = (
    "with attention=ring no rank has the probabilities of a query over all keys; use attention=ulysses, an attention "
    "dropout of 0, or recipe.dropout: false"
)


def check_ring(layout: Layout, trace: Trace) -> None:
    """Raise LayoutError for a model whose attention a ring can't compute."""
    if layout.attention != "ring":
        return
    for attention in trace.attentions:
        if attention.dropout > 0:
            raise LayoutError(
                f'layout "{layout}": {attention.modules[-1] if attention.modules else "the model"} drops attention '
                f"probabilities ({attention.dropout:g}), and {WITHOUT_DROPOUT}"
            )


def ring_attention(
    query: Tensor,  # [batch, heads, own tokens, head_dim]
    key: Tensor,  # [batch, key-value heads, own tokens, head_dim]
    value: Tensor,
    shares: Shares,
    tokens: int,
    *,
    mask: Tensor | None = None,  # [batch or 1, heads or 1, tokens or 1, tokens or 1], without a gradient
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """What `F.scaled_dot_product_attention` gives this rank's queries over the keys of all ranks."""
    kind = query.device.type
    # A function of our own isn't in autocast's lists, so the casts that it gives attention are made here.
    if torch.is_autocast_enabled(kind) and query.dtype != torch.float64:
        query, key, value = (part.to(torch.get_autocast_dtype(kind)) for part in (query, key, value))
    if mask is not None:
        mask = mask.reshape(*(1 for _ in range(4 - mask.ndim)), *mask.shape)
    ring = _Ring(
        shares=shares,
        tokens=tokens,
        causal=is_causal,
        scale=1 / math.sqrt(query.shape[-1]) if scale is None else scale,
    )
    return _RingAttention.apply(query, key, value, mask, ring)  # pyright: ignore[reportReturnType]


@dataclass(frozen=True, kw_only=True)
class _Ring:
    """The blocks of a ring and their order."""

    shares: Shares
    tokens: int
    causal: bool
    scale: float

    def sources(self) -> Iterator[int]:
        """The ranks whose keys this rank has in turn: its own, then those of the ranks before it."""
        ranks = self.shares.ranks
        return ((self.shares.rank - step) % ranks for step in range(ranks))

    def block(self, query: Tensor, key: Tensor, value: Tensor, rows: Tensor | None, source: int) -> "_Place | None":
        """The block to compute with the keys and values of rank `source`; None if no query sees any of them.

        `rows`: the rows of the mask for this rank's queries. [..., own tokens, tokens]
        """
        piece, own = self.shares.piece_length(self.tokens), query.shape[2]
        keys, first = self.shares.filled(source, self.tokens), 0
        if self.causal and source == self.shares.rank:
            keys = own  # padding comes last, where no token attends to it
        # The source has pieces s and 2p-1-s, this rank r and 2p-1-r. With s < r, piece s is before both of this
        # rank's pieces, and 2p-1-s after both.
        elif self.causal and source < self.shares.rank:
            keys = min(keys, piece)  # only the source's early piece
        # With s > r, pieces s and 2p-1-s are after piece r and before piece 2p-1-r, so only the late half of the
        # queries attends to them.
        elif self.causal:
            first = piece  # only this rank's late piece
        if not keys:
            return None
        block = KeyValueBlock(
            query=query.narrow(2, first, own - first),
            key=key.narrow(2, 0, keys),
            value=value.narrow(2, 0, keys),
            mask=None if rows is None else self._mask(rows, source, keys, own, query.dtype),
            causal=self.causal and source == self.shares.rank,
            scale=self.scale,
        )
        return _Place(block=block, first=first, keys=keys)

    def rows(self, mask: Tensor | None) -> Tensor | None:
        """The mask's rows of this rank's queries."""
        return mask if mask is None or mask.shape[2] == 1 else own_part(mask, self.shares, 2)

    def _mask(self, rows: Tensor, source: int, keys: int, queries: int, dtype: torch.dtype) -> Tensor:
        """The additive mask for the keys of rank `source`. [batch or 1, heads or 1, queries, keys]"""
        length = self.shares.piece_length(self.tokens)
        if rows.shape[3] > 1:
            pieces = [rows[..., piece * length : (piece + 1) * length] for piece in self.shares.pieces(source)]
            rows = torch.cat(pieces, 3)
        return additive(rows, dtype).expand(-1, -1, queries, keys)


@dataclass(frozen=True, kw_only=True)
class _Place:
    """A block of the scores and its place: the index of its first query, and its number of keys."""

    block: KeyValueBlock
    first: int
    keys: int


class _RingAttention(torch.autograd.Function):
    """Attention over a ring, with the two rounds that it takes.

    Saved for backward: own queries, keys, values, output and log-sum-exp, each [batch, heads, own tokens, ...]; keys
    and values of the other ranks come round again.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, ring: _Ring) -> Tensor:
        with _in_its_dtype(query):
            exact = exact_dtype(query.dtype)
            # [batch, heads, own tokens, value_dim], and without the last dimension
            # Added up in at least float32: one rounding a block in 16 bits would grow with the number of ranks.
            output = query.new_zeros(*query.shape[:-1], value.shape[-1], dtype=exact)
            lse = query.new_full(query.shape[:-1], -math.inf, dtype=exact)
            rows = ring.rows(mask)
            travelling = _flat(key, value)  # [numbers of own keys and values], one message
            for step, source in enumerate(ring.sources()):
                on_the_way = _pass_on(travelling, ring.shares) if step < ring.shares.ranks - 1 else None
                place = ring.block(query, *_parts(travelling, key, value), rows, source)
                if place is not None:
                    more = attend(place.block)
                    merge(output[:, :, place.first :], lse[:, :, place.first :], more)
                if on_the_way is not None:
                    travelling = on_the_way.wait()
            result = output.to(query.dtype)
            ctx.ring = ring
            ctx.save_for_backward(query, key, value, mask, result, lse)
            return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, output, lse = ctx.saved_tensors
        ring: _Ring = ctx.ring
        with _in_its_dtype(query):
            exact = exact_dtype(query.dtype)
            of_query = torch.zeros_like(query, dtype=exact, memory_format=torch.contiguous_format)
            rows = ring.rows(mask)
            travelling = _flat(key, value)
            sums: Tensor = travelling.new_zeros(travelling.shape, dtype=exact)  # of the gradients of `travelling`
            coming: _OnTheWay | None = None  # the sums for the keys that are here, from the rank before
            for step, source in enumerate(ring.sources()):
                on_the_way = _pass_on(travelling, ring.shares) if step < ring.shares.ranks - 1 else None
                place = ring.block(query, *_parts(travelling, key, value), rows, source)
                gradients_of_block = None
                if place is not None:
                    attended = Attended(output[:, :, place.first :], lse[:, :, place.first :])
                    gradients_of_block = gradients(place.block, gradient[0][:, :, place.first :], attended)
                if coming is not None:
                    sums = coming.wait()
                if place is not None and gradients_of_block is not None:
                    of_query[:, :, place.first :] += gradients_of_block[0]
                    for total, more in zip(_parts(sums, key, value), gradients_of_block[1:], strict=True):
                        total[:, :, : place.keys] += more
                # Only now: this rank has just added its own part.
                coming = _pass_on(sums, ring.shares)  # at last to the rank whose keys they are of
                if on_the_way is not None:
                    travelling = on_the_way.wait()
            assert coming is not None
            of_key, of_value = _parts(coming.wait(), key, value)
            return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype), None, None


def _in_its_dtype(tensor: Tensor) -> AbstractContextManager[Any]:
    """Disable autocast."""
    kind = tensor.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def _flat(key: Tensor, value: Tensor) -> Tensor:
    """Flatten keys and values into one message."""
    return torch.cat([key.reshape(-1), value.reshape(-1)])


def _parts(message: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """View a message as keys and values, of the shapes of this rank's own."""
    return message[: key.numel()].view(key.shape), message[key.numel() :].view(value.shape)


@dataclass(frozen=True, kw_only=True)
class _OnTheWay:
    """A message that is being sent, and the one that is being received."""

    sent: Tensor  # kept alive until it is sent
    received: Tensor
    works: list[dist.Work]

    def wait(self) -> Tensor:
        """Wait until both messages are complete. Returns the received one."""
        for work in self.works:
            work.wait()
        return self.received


def _pass_on(message: Tensor, shares: Shares) -> _OnTheWay:
    """Start to send a message to the next rank of the ring, and to receive one from the rank before."""
    group, rank, ranks = shares.group, shares.rank, shares.ranks
    received = torch.empty_like(message)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, message, dist.get_global_rank(group, (rank + 1) % ranks), group),
            dist.P2POp(dist.irecv, received, dist.get_global_rank(group, (rank - 1) % ranks), group),
        ]
    )
    return _OnTheWay(sent=message, received=received, works=works)
