"""The messages of sliced layers over whole tokens, forward and backward (Shoeybi et al. 2019, section 3: f and g).

`copy` and `reduce` are each other's backward, so a loss may take gradients of gradients through them.

             forward       backward        where
    copy     identity      all-reduce      before columns: each rank's gradient is of its own features only
    reduce   all-reduce    identity        after a row layer: each rank's output is a part of the sum
    gather   all-gather    own slice       where what follows is computed by every rank alike

"Replicated computation": every rank of the group goes on with the same numbers and so has the same gradient; adding
these up would count it as often as there are ranks, which is why `reduce` and `gather` don't.
"""

# PyTorch's stub of backward takes any number of gradients; these functions give one.
# pyright: reportIncompatibleMethodOverride=false

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


def _summed(x: Tensor, group: Group) -> Tensor:
    """The sum over the group, in a tensor of its own."""
    # The all-reduce works in place, and the forward's own tensor may be needed by backward.
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total
