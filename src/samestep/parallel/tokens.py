"""Tokens split over a group of ranks: the messages at the edges of a split, forward and backward.

Rank r of p holds the tokens `bounds(total, r, p)`: any number of tokens works, and no padding reaches the model; only
messages are padded, since every rank's part of one must be of one size. (Korthikanti et al. 2022, section 4.2.)

                       forward           backward          where
    split              own tokens        all-gather        every rank has the whole
    gather             all-gather        own tokens        what follows is the same on every rank
    gather_for_parts   all-gather        reduce-scatter    each rank goes on with its own features or heads
    sum_and_split      reduce-scatter    all-gather        each rank has a part of the sum
"""

# PyTorch's stub of backward takes any number of gradients; these functions give one.
# pyright: reportIncompatibleMethodOverride=false

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from samestep.comm.messages import all_gather_uneven, reduce_scatter_uneven
from samestep.data.order import bounds

Group = dist.ProcessGroup


def split(tokens: Tensor, group: Group, dim: int = 1) -> Tensor:
    """This rank's tokens of a tensor that every rank has whole; backward puts the gradient together again."""
    return _Split.apply(tokens, group, dim)  # pyright: ignore[reportReturnType]


def gather(tokens: Tensor, group: Group, total: int, dim: int = 1) -> Tensor:
    """All `total` tokens, for replicated computation; backward takes this rank's part of the gradient."""
    return _Gather.apply(tokens, group, total, dim)  # pyright: ignore[reportReturnType]


def gather_for_parts(tokens: Tensor, group: Group, total: int, dim: int = 1) -> Tensor:
    """All `total` tokens, for what each rank computes a part of; backward sums the gradient over the ranks."""
    return _GatherForParts.apply(tokens, group, total, dim)  # pyright: ignore[reportReturnType]


def sum_and_split(tokens: Tensor, group: Group, dim: int = 1) -> Tensor:
    """This rank's tokens of the sum over the ranks; backward puts the gradient of all tokens together."""
    return _SumAndSplit.apply(tokens, group, dim)  # pyright: ignore[reportReturnType]


class _Split(torch.autograd.Function):
    """Forward: this rank's tokens. Backward: all-gather."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim, ctx.total = group, dim, tokens.shape[dim]
        return _mine(tokens, group, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _all_gather(gradient, ctx.group, ctx.total, ctx.dim), None, None


class _Gather(torch.autograd.Function):
    """Forward: all-gather. Backward: this rank's tokens."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, group: Group, total: int, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return _all_gather(tokens, group, total, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _mine(gradient, ctx.group, ctx.dim), None, None, None


class _GatherForParts(torch.autograd.Function):
    """Forward: all-gather. Backward: reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, group: Group, total: int, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return _all_gather(tokens, group, total, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _reduce_scatter(gradient, ctx.group, ctx.dim), None, None, None


class _SumAndSplit(torch.autograd.Function):
    """Forward: reduce-scatter. Backward: all-gather."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim, ctx.total = group, dim, tokens.shape[dim]
        return _reduce_scatter(tokens, group, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _all_gather(gradient, ctx.group, ctx.total, ctx.dim), None, None


def _lengths(total: int, group: Group) -> list[int]:
    """How many tokens each rank of the group has."""
    parts = dist.get_world_size(group)
    return [last - first for first, last in (bounds(total, rank, parts) for rank in range(parts))]


def _mine(tokens: Tensor, group: Group, dim: int) -> Tensor:
    """This rank's tokens of a tensor that is whole here."""
    first, last = bounds(tokens.shape[dim], dist.get_rank(group), dist.get_world_size(group))
    return tokens.narrow(dim, first, last - first).contiguous()


def _all_gather(tokens: Tensor, group: Group, total: int, dim: int) -> Tensor:
    return all_gather_uneven(tokens, group, _lengths(total, group), dim)


def _reduce_scatter(tokens: Tensor, group: Group, dim: int) -> Tensor:
    return reduce_scatter_uneven(tokens, group, _lengths(tokens.shape[dim], group), dim)
