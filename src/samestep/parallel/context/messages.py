"""Messages between ranks that hold the tokens of a sequence in parts, as functions that backward knows.

Parts are of one length, as an exchange wants them: the last ones are filled up with zeros, which are cut off when
tokens are put together.

                       forward             backward
    split              own part            all-gather           every rank has the whole, and uses its part
    gather             all-gather          own part             every rank goes on with the whole alike
    gradient_summed    identity            all-reduce           each rank computes something else from the whole
    gradient_shared    identity            1 / ranks            all compute alike, and a sum over ranks follows
    exchange           all-to-all          all-to-all back      heads for tokens

Ranks of the context axis take part in each, in the order in which their forwards (and backwards) come to them.
"""

# PyTorch's stub of backward takes any number of gradients, and its mark of one that is taken once knows no ctx.
# pyright: reportIncompatibleMethodOverride=false

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from samestep.comm.messages import all_gather, reduce_scatter_uneven
from samestep.parallel.exact.forward_context import Positions

# The fewest tokens of a part: attention takes a lone query for one that is decoded after others.
_FEWEST = 2


@dataclass(frozen=True, kw_only=True)
class Shares:
    """Which tokens each rank of a group has: consecutive ones, or two pieces that balance causal attention.

    With `zigzag` the tokens are cut in 2 x ranks pieces, of which rank r has number r and number 2 x ranks - 1 - r:
    an early one, which sees few tokens before it, and a late one (Llama 3's report, arXiv 2407.21783, section 3.3.2).
    """

    group: dist.ProcessGroup
    zigzag: bool = False

    @property
    def ranks(self) -> int:
        return dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    def pieces(self, rank: int) -> tuple[int, ...]:
        """The numbers of a rank's pieces, in the order in which it has them."""
        return (rank, 2 * self.ranks - 1 - rank) if self.zigzag else (rank,)

    def piece_length(self, tokens: int) -> int:
        """Tokens of a piece; the last pieces are filled up."""
        if self.zigzag:
            return max(-(-tokens // (2 * self.ranks)), 1)
        return max(-(-tokens // self.ranks), min(_FEWEST, tokens))

    def length(self, tokens: int) -> int:
        """The number of tokens of each rank's part, including padding."""
        return self.piece_length(tokens) * (2 if self.zigzag else 1)

    def filled(self, rank: int, tokens: int) -> int:
        """The number of tokens of a rank's part without padding; they come first."""
        length = self.piece_length(tokens)
        return sum(min(max(tokens - piece * length, 0), length) for piece in self.pieces(rank))

    def positions(self, tokens: int, device: torch.device) -> Positions:
        """The positions of this rank's tokens in the sequence."""
        length = self.piece_length(tokens)
        firsts = [piece * length for piece in self.pieces(self.rank)]
        if len(firsts) == 1:
            return firsts[0]
        return torch.cat([torch.arange(first, first + length, device=device) for first in firsts])


def split(whole: Tensor, shares: Shares, dim: int = 1) -> Tensor:
    """This rank's part of a tensor that every rank of the group has, and the same one. Backward gathers."""
    return _Split.apply(whole, shares, dim)  # pyright: ignore[reportReturnType]


def gather(part: Tensor, shares: Shares, tokens: int, dim: int = 1) -> Tensor:
    """Gather all `tokens` from the ranks' parts. Backward takes this rank's part of the gradient."""
    return _Gather.apply(part, shares, tokens, dim)  # pyright: ignore[reportReturnType]


def own_part(whole: Tensor, shares: Shares, dim: int = 1) -> Tensor:
    """This rank's part, for tensors without gradients."""
    length = shares.piece_length(whole.shape[dim])
    pieces = [_piece(whole, number * length, length, dim) for number in shares.pieces(shares.rank)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def _piece(whole: Tensor, first: int, length: int, dim: int) -> Tensor:
    """A piece of the tokens, padded with zeros at the end."""
    first = min(first, whole.shape[dim])
    # Tokens [first, first + length) of the whole, fewer at its end, none behind it.
    mine = whole.narrow(dim, first, min(length, whole.shape[dim] - first))
    missing = length - mine.shape[dim]
    return F.pad(mine, [0, 0] * (whole.ndim - 1 - dim) + [0, missing]) if missing else mine


def all_parts(part: Tensor, shares: Shares, tokens: int, dim: int = 1) -> Tensor:
    """Gather the ranks' parts in the order of tokens, without padding; for tensors without gradients."""
    whole = all_gather(part, shares.group, dim)  # ranks' parts in the order of ranks
    if shares.zigzag:
        length = part.shape[dim] // 2
        ranks = range(shares.ranks)
        # Rank r's two pieces stand at 2r and 2r + 1. [2 x ranks pieces]
        places = [*(2 * rank for rank in ranks), *(2 * rank + 1 for rank in reversed(ranks))]
        firsts = range(0, tokens, length)
        return torch.cat(
            [
                whole.narrow(dim, place * length, min(length, tokens - first))
                for place, first in zip(places, firsts, strict=False)
            ],
            dim,
        )
    # Cloned, since FSDP2 puts hooks on the tensors that a module returns, which must not be views.
    return whole if whole.shape[dim] == tokens else whole.narrow(dim, 0, tokens).clone()


def summed_part(whole: Tensor, shares: Shares, dim: int = 1) -> Tensor:
    """This rank's part of the sum of a tensor over the ranks; for tensors without gradients."""
    tokens = whole.shape[dim]
    length = shares.piece_length(tokens)
    numbers = [number for rank in range(shares.ranks) for number in shares.pieces(rank)]
    # In the order of ranks and their pieces, as the reduce-scatter hands them out.
    in_turn = torch.cat([_piece(whole, number * length, length, dim) for number in numbers], dim)
    return reduce_scatter_uneven(in_turn, shares.group, [shares.length(tokens)] * shares.ranks, dim)


def gradient_summed(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The same tensor, for what each rank computes from it for its own tokens. Backward adds up the gradients."""
    return _GradientSummed.apply(whole, group)  # pyright: ignore[reportReturnType]


def gradient_shared(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The same tensor, for replicated computation where gradients are summed over the ranks afterwards.

    Backward gives an equal share of the gradient to each rank.
    """
    return _GradientShared.apply(whole, group)  # pyright: ignore[reportReturnType]


class _GradientSummed(torch.autograd.Function):
    """Forward: identity. Backward: all-reduce."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return whole.view_as(whole)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        summed = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(summed, group=ctx.group)
        return summed, None


class _GradientShared(torch.autograd.Function):
    """Forward: identity. Backward: 1 / ranks of the gradient, without a message."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.ranks = group.size()
        return whole.view_as(whole)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] / ctx.ranks, None


class _Split(torch.autograd.Function):
    """Forward: this rank's part. Backward: all-gather of the parts' gradients."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, shares: Shares, dim: int) -> Tensor:
        ctx.shares, ctx.dim, ctx.tokens = shares, dim, whole.shape[dim]
        mine = own_part(whole, shares, dim)
        return mine if shares.zigzag else mine.clone()  # a view would keep the whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return all_parts(gradients[0], ctx.shares, ctx.tokens, ctx.dim), None, None


class _Gather(torch.autograd.Function):
    """Forward: all-gather. Backward: this rank's part of the gradient."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, shares: Shares, tokens: int, dim: int) -> Tensor:
        ctx.shares, ctx.dim = shares, dim
        return all_parts(part, shares, tokens, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return own_part(gradients[0], ctx.shares, ctx.dim), None, None, None


def exchange(tensor: Tensor, group: dist.ProcessGroup, *, split_dim: int, join_dim: int) -> Tensor:
    """Cut along one dimension, send a piece to each rank, and join what comes along another (all-to-all).

    `split_dim` must be divisible by the ranks. Backward sends everything back.
    """
    return _Exchange.apply(tensor, group, split_dim, join_dim)  # pyright: ignore[reportReturnType]


class _Exchange(torch.autograd.Function):
    """Forward: all-to-all from `split_dim` to `join_dim`. Backward: all-to-all from `join_dim` to `split_dim`."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup, split_dim: int, join_dim: int) -> Tensor:
        ctx.group, ctx.split_dim, ctx.join_dim = group, split_dim, join_dim
        return _exchanged(tensor, group, split_dim, join_dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchanged(gradients[0], ctx.group, ctx.join_dim, ctx.split_dim), None, None, None


def _exchanged(tensor: Tensor, group: dist.ProcessGroup, split_dim: int, join_dim: int) -> Tensor:
    """[..., n * a, ..., b, ...] -> [..., a, ..., n * b, ...]: split along one dimension, joined along another."""
    # all_to_all_single sends consecutive pieces of the first dimension, so the pieces are laid out there.
    pieces = torch.stack(tensor.chunk(group.size(), split_dim))  # [ranks, ...], one piece for each rank
    received = torch.empty_like(pieces)  # [ranks, ...], piece r from rank r
    dist.all_to_all_single(received, pieces, group=group)
    return torch.cat(list(received), join_dim)
