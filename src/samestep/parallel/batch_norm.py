"""Batch norm over the global batch: statistics of the samples of all data ranks, as one process would take them.

(Ioffe & Szegedy 2015, algorithm 1.)
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from samestep.data.loader import Moment
from samestep.errors import UserError
from samestep.parallel.moment import Now

BatchNorm = nn.modules.batchnorm._BatchNorm  # BatchNorm1d, 2d, 3d and SyncBatchNorm


def global_batch_norm(model: nn.Module, group: dist.ProcessGroup, now: Now) -> None:
    """Make every batch norm of a model take its statistics over the ranks of `group`, in training steps."""
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            module.__class__ = _OfAnyDimensions  # pyright: ignore[reportAttributeAccessIssue]
        if isinstance(module, BatchNorm):
            vars(module)["forward"] = partial(_forward, module, name, module.forward, group, now)


def _forward(
    module: Any, name: str, forward: Callable[[Tensor], Tensor], group: dist.ProcessGroup, now: Now, given: Tensor
) -> Tensor:
    moment = now.moment
    if not module.training or moment is None:
        return forward(given)
    if moment.micro_batches > 1:
        raise UserError(
            f"{name or 'the model'} ({type(module).__name__}) takes its statistics from the whole batch, and a step "
            f"of {moment.micro_batches} micro-batches a rank never has it at once; run.micro_batch: null would do, "
            "and so would group norm or layer norm"
        )
    if dist.get_world_size(group) == 1:
        return _untracked(module, given) if now.recomputing else forward(given)
    centred, mean, variance, count = _statistics(given, group, moment)
    if module.track_running_stats and not now.recomputing:
        _track(module, mean.detach(), variance.detach(), count)
    shape = [1, -1, *(1 for _ in given.shape[2:])]
    normed = centred * (variance + module.eps).rsqrt().view(shape)
    if module.weight is not None:
        normed = normed * module.weight.view(shape) + module.bias.view(shape)
    return normed.to(given.dtype)


def _statistics(given: Tensor, group: dist.ProcessGroup, moment: Moment) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What is left of [samples, features, ...] after the mean; the mean, the biased variance and the count.

    These three are of each feature over all ranks' samples; the count is of numbers, not of samples.
    """
    weight = 0.0 if moment.lent else 1.0
    numbers = given.to(torch.promote_types(given.dtype, torch.float32))
    others = [dim for dim in range(given.ndim) if dim != 1]
    shape = [1, -1, *(1 for _ in given.shape[2:])]
    count = numbers.new_full((1,), weight * given.numel() / given.size(1))
    sums = _SumOverRanks.apply(torch.cat([numbers.sum(others) * weight, count]), group)
    count = sums[-1].detach()
    if count <= 1:
        raise UserError(
            f"batch norm: a global batch of one number for each of {given.size(1)} features has no variance; "
            "a recipe.batch that doesn't leave one sample for the last step would do"
        )
    mean = sums[:-1] / count
    # Squares of what is left after the mean: a difference of two large sums would lose digits.
    centred = numbers - mean.view(shape)
    squares = centred.square().sum(others) * weight
    return centred, mean, _SumOverRanks.apply(squares, group) / count, count


def _track(module: Any, mean: Tensor, variance: Tensor, count: Tensor) -> None:
    """Move the running statistics as PyTorch does: the mean, and the unbiased variance."""
    with torch.no_grad():
        module.num_batches_tracked.add_(1)
        momentum = 1 / int(module.num_batches_tracked) if module.momentum is None else module.momentum
        module.running_mean.lerp_(mean.to(module.running_mean), momentum)
        module.running_var.lerp_((variance * count / (count - 1)).to(module.running_var), momentum)


def _untracked(module: Any, given: Tensor) -> Tensor:
    """Batch norm by this process's samples, which leaves the running statistics as they are."""
    # Copies to throw away: a recomputed layer must keep as many tensors for backward as it kept at first.
    known = [None if each is None else each.clone() for each in (module.running_mean, module.running_var)]
    mean, variance = known
    return F.batch_norm(given, mean, variance, module.weight, module.bias, training=True, eps=module.eps)


class _OfAnyDimensions(BatchNorm):
    """What a SyncBatchNorm is here: PyTorch's own refuses to work on a CPU, and does as much by other messages."""

    def _check_input_dim(self, input: Tensor) -> None:
        pass


class _SumOverRanks(torch.autograd.Function):
    """The sum over ranks, whose gradient is the sum of what every rank's loss asks of it."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:  # pyright: ignore
        ctx.group = group
        total = part.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore
        total = gradient.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None
