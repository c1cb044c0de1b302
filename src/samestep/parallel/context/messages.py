"""Messages between ranks that hold the tokens of a sequence in parts, as functions that backward knows.

Parts are of one length, as an exchange wants them: the last ones are filled up with zeros, which are cut off when
tokens are put together.
"""

# PyTorch's stub of backward takes any number of gradients, and its mark of one that is taken once knows no ctx.
# pyright: reportIncompatibleMethodOverride=false

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from samestep.comm.gather import all_gather

# The fewest tokens of a part: attention takes a lone query for one that is decoded after others.
_FEWEST = 2


def part_length(tokens: int, ranks: int) -> int:
    """Tokens of each rank's part."""
    return max(-(-tokens // ranks), min(_FEWEST, tokens))


def split(whole: Tensor, group: dist.ProcessGroup, dim: int = 1) -> Tensor:
    """This rank's part of a tensor that every rank of the group has, and the same one. Backward gathers."""
    return _Split.apply(whole, group, dim)  # pyright: ignore[reportReturnType]


def gather(part: Tensor, group: dist.ProcessGroup, tokens: int, dim: int = 1) -> Tensor:
    """All `tokens` from the ranks' parts. Backward takes each rank's part of a gradient that is the same on all."""
    return _Gather.apply(part, group, tokens, dim)  # pyright: ignore[reportReturnType]


def own_part(whole: Tensor, group: dist.ProcessGroup, dim: int = 1) -> Tensor:
    """This rank's part, for tensors without gradients."""
    ranks, tokens = dist.get_world_size(group), whole.shape[dim]
    length = part_length(tokens, ranks)
    first = min(dist.get_rank(group) * length, tokens)
    mine = whole.narrow(dim, first, min(length, tokens - first))
    missing = length - mine.shape[dim]
    return F.pad(mine, [0, 0] * (whole.ndim - 1 - dim) + [0, missing]) if missing else mine


def all_parts(part: Tensor, group: dist.ProcessGroup, tokens: int, dim: int = 1) -> Tensor:
    """Every rank's part in a row, without what filled them up; for tensors without gradients."""
    whole = all_gather(part, group, dim)
    # A copy of its own: shards of parameters hook what a module returns, and want no view there.
    return whole if whole.shape[dim] == tokens else whole.narrow(dim, 0, tokens).clone()


def gradient_summed(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The same tensor, for what each rank computes from it for its own tokens. Backward adds up the gradients."""
    return _GradientSummed.apply(whole, group)  # pyright: ignore[reportReturnType]


def gradient_shared(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The same tensor, for replicated computation where gradients are summed over the ranks afterwards.

    Backward gives an equal share of the gradient to each rank.
    """
    return _GradientShared.apply(whole, group)  # pyright: ignore[reportReturnType]


class _GradientSummed(torch.autograd.Function):
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
    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.ranks = group.size()
        return whole.view_as(whole)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] / ctx.ranks, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim, ctx.tokens = group, dim, whole.shape[dim]
        return own_part(whole, group, dim).clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return all_parts(gradients[0], ctx.group, ctx.tokens, ctx.dim), None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup, tokens: int, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return all_parts(part, group, tokens, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return own_part(gradients[0], ctx.group, ctx.dim), None, None, None


def exchange(tensor: Tensor, group: dist.ProcessGroup, *, split_dim: int, join_dim: int) -> Tensor:
    """Cut along one dimension, send a piece to each rank, and join what comes along another (all-to-all).

    `split_dim` must be divisible by the ranks. Backward sends everything back.
    """
    return _Exchange.apply(tensor, group, split_dim, join_dim)  # pyright: ignore[reportReturnType]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup, split_dim: int, join_dim: int) -> Tensor:
        ctx.group, ctx.split_dim, ctx.join_dim = group, split_dim, join_dim
        return _exchanged(tensor, group, split_dim, join_dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchanged(gradients[0], ctx.group, ctx.join_dim, ctx.split_dim), None, None, None


def _exchanged(tensor: Tensor, group: dist.ProcessGroup, split_dim: int, join_dim: int) -> Tensor:
    pieces = torch.stack(tensor.chunk(group.size(), split_dim))  # [ranks, ...], one piece for each rank
    received = torch.empty_like(pieces)
    dist.all_to_all_single(received, pieces, group=group)
    return torch.cat(list(received), join_dim)
