"""Collectives with a backward: what each sends in forward, and what its gradient sends in backward.

A region is what the ranks of a group compute in parts, each with its own features, heads, tokens or experts. Outside
of a region every rank computes the same.

    operator                    forward           backward          where
    copy_to_region              identity          all-reduce        before columns: each rank has its own features
    reduce_from_region          all-reduce        identity          after a row layer: each rank has a part of the sum
    scatter_to_region           own part          all-gather        each rank goes on with its part of a whole
    gather_from_region          all-gather        own part          all ranks compute the same from here on
    gather_to_region            all-gather        reduce-scatter    own tokens before columns, or keys for all queries
    reduce_scatter_to_region    reduce-scatter    all-gather        after a row layer, to own tokens of the sum
    all_to_all                  all-to-all        all-to-all        rows for experts that other ranks hold
    all_to_all_dims             all-to-all        all-to-all        heads for tokens
    all_reduce                  all-reduce        all-reduce        every rank's part of the loss depends on the sum
    divide_gradient             identity          1 / ranks         all compute the same, and a sum over ranks follows

In a region each rank's gradient is of its own part of the computation, so backward of what leads to one adds the
ranks' gradients up or joins them. Behind a region all ranks have the same gradient, and adding these up would count
it as often as there are ranks, so backward of what leads out of one takes it as it is. (Shoeybi et al. 2019, section
3: f and g; Korthikanti et al. 2022, section 4.2: with tokens split between the layers.)

Ranks of the group take part in each, in the order in which their forwards (and backwards) come to them.
`copy_to_region` and `reduce_from_region` are each other's backward, `all_to_all` and `all_reduce` their own: through
these a loss may take gradients of gradients.
"""

# PyTorch's stub of backward takes any number of gradients, and its mark of one that is taken once knows no ctx.
# pyright: reportIncompatibleMethodOverride=false

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from samestep.comm.messages import all_gather_uneven, reduce_scatter_uneven
from samestep.data.order import bounds

Group = dist.ProcessGroup


class Split(Protocol):
    """How a dimension is split over the ranks of a group, with the messages that this takes, without gradients."""

    def own(self, whole: Tensor, dim: int, *, view: bool = True) -> Tensor:
        """This rank's part of a tensor; with `view` it may share the tensor's memory."""
        ...

    def gathered(self, part: Tensor, dim: int) -> Tensor:
        """All ranks' parts, joined."""
        ...

    def summed(self, whole: Tensor, dim: int) -> Tensor:
        """This rank's part of the sum over the ranks."""
        ...


@dataclass(frozen=True, kw_only=True)
class Slices:
    """Consecutive slices of any lengths, rank r's of `lengths[r]`. Only messages are padded, to the longest."""

    group: Group
    lengths: Sequence[int]

    @classmethod
    def even(cls, total: int, group: Group) -> "Slices":
        """`total` shared out over the ranks as evenly as possible, the first ranks' slices being the longer ones."""
        ranks = dist.get_world_size(group)
        every = (bounds(total, rank, ranks) for rank in range(ranks))
        return cls(group=group, lengths=[last - first for first, last in every])

    def own(self, whole: Tensor, dim: int, *, view: bool = True) -> Tensor:
        rank = dist.get_rank(self.group)
        part = whole.narrow(dim, sum(self.lengths[:rank]), self.lengths[rank])
        return part.contiguous() if view else part.clone(memory_format=torch.contiguous_format)

    def gathered(self, part: Tensor, dim: int) -> Tensor:
        return all_gather_uneven(part, self.group, self.lengths, dim)

    def summed(self, whole: Tensor, dim: int) -> Tensor:
        return reduce_scatter_uneven(whole, self.group, self.lengths, dim)


def copy_to_region(x: Tensor, group: Group) -> Tensor:
    """The same tensor, for what each rank computes a part of."""
    return _CopyToRegion.apply(x, group)  # pyright: ignore[reportReturnType]


def reduce_from_region(x: Tensor, group: Group) -> Tensor:
    """The sum over the ranks, for a computation that every rank repeats."""
    return _ReduceFromRegion.apply(x, group)  # pyright: ignore[reportReturnType]


def scatter_to_region(whole: Tensor, split: Split, dim: int) -> Tensor:
    """This rank's part of a tensor that every rank has."""
    return _ScatterToRegion.apply(whole, split, dim)  # pyright: ignore[reportReturnType]


def gather_from_region(part: Tensor, split: Split, dim: int) -> Tensor:
    """All ranks' parts, joined along a dimension, for a computation that every rank repeats."""
    return _GatherFromRegion.apply(part, split, dim)  # pyright: ignore[reportReturnType]


def gather_to_region(part: Tensor, split: Split, dim: int) -> Tensor:
    """All ranks' parts along a dimension, for what each rank computes a part of."""
    return _GatherToRegion.apply(part, split, dim)  # pyright: ignore[reportReturnType]


def reduce_scatter_to_region(x: Tensor, split: Split, dim: int) -> Tensor:
    """This rank's part of the sum over the ranks."""
    return _ReduceScatterToRegion.apply(x, split, dim)  # pyright: ignore[reportReturnType]


def all_to_all(
    rows: Tensor, group: Group, send: Sequence[int] | None = None, receive: Sequence[int] | None = None
) -> Tensor:
    """The rows [sum(receive), ...] that the ranks of a group have for this one, in the order of the ranks.

    `rows` [sum(send), ...]: those for rank 0 first. Without counts every rank sends equally many to each.
    """
    counts = (None, None) if send is None or receive is None else (list(send), list(receive))
    return _AllToAll.apply(rows, group, *counts)  # pyright: ignore[reportReturnType]


def all_to_all_dims(x: Tensor, group: Group, *, split_dim: int, join_dim: int) -> Tensor:
    """Cut along one dimension, send a piece to each rank, and join what comes along another.

    [..., n * a, ..., b, ...] -> [..., a, ..., n * b, ...] for n ranks; `split_dim` must be divisible by them.
    """
    # `all_to_all` sends consecutive rows of the first dimension, so the pieces are laid out there.
    pieces = torch.stack(x.chunk(group.size(), split_dim))  # [ranks, ...], one piece for each rank
    return torch.cat(list(all_to_all(pieces, group)), join_dim)  # of [ranks, ...], piece r from rank r


def all_reduce(part: Tensor, group: Group) -> Tensor:
    """The sum over the ranks, where each rank goes on to a part of the loss by itself.

    With L = sum over ranks of L_r, and total = sum over ranks of part_r, each rank's part reaches every L_r through
    the total: dL / d(part_r) = sum over ranks s of dL_s / d(total). So backward is an all-reduce as well, and all
    ranks must run it: also those whose gradient is zero.
    """
    return _AllReduce.apply(part, group)  # pyright: ignore[reportReturnType]


def divide_gradient(x: Tensor, group: Group) -> Tensor:
    """The same tensor, for a computation that all ranks repeat, whose gradients are summed over them afterwards."""
    return _DivideGradient.apply(x, group)  # pyright: ignore[reportReturnType]


class _CopyToRegion(torch.autograd.Function):
    """Forward: identity. Backward: all-reduce."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return reduce_from_region(gradient, ctx.group), None


class _ReduceFromRegion(torch.autograd.Function):
    """Forward: all-reduce. Backward: identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _summed(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return copy_to_region(gradient, ctx.group), None


class _ScatterToRegion(torch.autograd.Function):
    """Forward: this rank's part. Backward: all-gather."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, split: Split, dim: int) -> Tensor:
        ctx.split, ctx.dim = split, dim
        return split.own(whole, dim, view=False)  # a view would keep the whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.split.gathered(gradient, ctx.dim), None, None


class _GatherFromRegion(torch.autograd.Function):
    """Forward: all-gather. Backward: this rank's part."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, split: Split, dim: int) -> Tensor:
        ctx.split, ctx.dim = split, dim
        return split.gathered(part, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.split.own(gradient, ctx.dim), None, None


class _GatherToRegion(_GatherFromRegion):
    """Forward: all-gather. Backward: reduce-scatter."""

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.split.summed(gradient, ctx.dim), None, None


class _ReduceScatterToRegion(torch.autograd.Function):
    """Forward: reduce-scatter. Backward: all-gather."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, split: Split, dim: int) -> Tensor:
        ctx.split, ctx.dim = split, dim
        return split.summed(x, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.split.gathered(gradient, ctx.dim), None, None


class _AllToAll(torch.autograd.Function):
    """Forward: all-to-all. Backward: all-to-all, each gradient back to where its row came from.

    Every rank runs both, also without any row to send or to receive.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Group, send: list[int] | None, receive: list[int] | None) -> Tensor:
        ctx.group, ctx.send, ctx.receive = group, send, receive
        if receive is not None:
            # Recomputation stops once all saved tensors are recomputed. Experts without rows save none, so without
            # this saved tensor the rank would skip the exchange.
            ctx.save_for_backward(rows.new_empty(0))
        received = rows.new_empty((len(rows) if receive is None else sum(receive), *rows.shape[1:]))
        dist.all_to_all_single(received, rows.contiguous(), receive, send, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        _ = ctx.saved_tensors
        return all_to_all(gradient, ctx.group, ctx.receive, ctx.send), None, None, None


class _AllReduce(_ReduceFromRegion):
    """Forward: all-reduce. Backward: all-reduce."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return all_reduce(gradient, ctx.group), None


class _DivideGradient(torch.autograd.Function):
    """Forward: identity. Backward: 1 / ranks of the gradient, without a message."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.ranks = group.size()
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient / ctx.ranks, None


def _summed(x: Tensor, group: Group) -> Tensor:
    """The sum over the group, in a tensor of its own."""
    # The all-reduce works in place, and the forward's own tensor may be needed by backward.
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total
