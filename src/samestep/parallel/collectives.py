"""The messages of sliced layers and of shared experts, forward and backward.

               forward       backward           where
    copy       identity      all-reduce         before columns: each rank's gradient is of its own features only
    reduce     all-reduce    identity           after a row layer: each rank's output is a part of the sum
    gather     all-gather    own slice          where all ranks compute the same from here on
    exchange   all-to-all    all-to-all back    rows for experts that other ranks hold

`copy` and `reduce` (Shoeybi et al. 2019, section 3: f and g) are each other's backward, and `exchange` its own, so a
loss may take gradients of gradients through them.

"Replicated computation": every rank of the group goes on with the same numbers and so has the same gradient; adding
these up would count it as often as there are ranks, which is why `reduce` and `gather` don't.
"""

# PyTorch's stub of backward takes any number of gradients; these functions give one.
# pyright: reportIncompatibleMethodOverride=false

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from samestep.comm.messages import all_gather_uneven

Group = dist.ProcessGroup


def copy(x: Tensor, group: Group) -> Tensor:
    """The same tensor, for what each rank computes a part of; backward sums the gradient over the ranks."""
    return _Copy.apply(x, group)  # pyright: ignore[reportReturnType]


def reduce(x: Tensor, group: Group) -> Tensor:
    """The sum over the ranks, for replicated computation; backward leaves the gradient as it is."""
    return _Reduce.apply(x, group)  # pyright: ignore[reportReturnType]


def gather(x: Tensor, group: Group, lengths: list[int], dim: int) -> Tensor:
    """All ranks' parts along a dimension, for replicated computation; backward takes this rank's part."""
    return _Gather.apply(x, group, lengths, dim)  # pyright: ignore[reportReturnType]


def exchange(rows: Tensor, send: Sequence[int], receive: Sequence[int], group: Group) -> Tensor:
    """The rows [sum(receive), ...] that the ranks of a group have for this one, in the order of the ranks.

    `rows` [sum(send), ...]: those for rank 0 first. Backward sends every gradient back to where its row came from.
    """
    return _Exchange.apply(rows, list(send), list(receive), group)  # pyright: ignore[reportReturnType]


def exchange_counts(counts: Tensor, group: Group) -> Tensor:
    """All-to-all of one row for each rank: [ranks, ...] -> [ranks, ...]."""
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts.contiguous(), group=group)
    return received


class _Copy(torch.autograd.Function):
    """Forward: identity. Backward: all-reduce."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return reduce(gradient, ctx.group), None


class _Reduce(torch.autograd.Function):
    """Forward: all-reduce. Backward: identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _summed(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return copy(gradient, ctx.group), None


class _Gather(torch.autograd.Function):
    """Forward: all-gather along a dimension. Backward: this rank's slice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, lengths: list[int], dim: int) -> Tensor:
        ctx.group, ctx.lengths, ctx.dim = group, lengths, dim
        return all_gather_uneven(x, group, lengths, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient.split(ctx.lengths, ctx.dim)[dist.get_rank(ctx.group)].contiguous(), None, None, None


class _Exchange(torch.autograd.Function):
    """Forward and backward: all-to-all. Every rank runs both, also without any row to send or to receive."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, send: list[int], receive: list[int], group: Group) -> Tensor:
        """All-to-all of rows; backward is the same with the counts exchanged."""
        ctx.send, ctx.receive, ctx.group = send, receive, group
        # Recomputation stops once all saved tensors are recomputed. Experts without rows save none, so without this
        # saved tensor the rank would skip the exchange.
        ctx.save_for_backward(rows.new_empty(0))
        received = rows.new_empty((sum(receive), *rows.shape[1:]))
        dist.all_to_all_single(received, rows.contiguous(), receive, send, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Send the rows' gradients back to the ranks that sent the rows."""
        _ = ctx.saved_tensors
        return exchange(gradient, ctx.receive, ctx.send, ctx.group), None, None, None


def _summed(x: Tensor, group: Group) -> Tensor:
    """The sum over the group, in a tensor of its own."""
    # The all-reduce works in place, and the forward's own tensor may be needed by backward.
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total
