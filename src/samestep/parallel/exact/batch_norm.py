"""Batch norm over the global batch: statistics of the samples of all data ranks, as one process would take them.

(Ioffe & Szegedy 2015, algorithm 1.)

For a feature with numbers x of all ranks' samples, n of them:

    mean = sum(x) / n,   variance = sum((x - mean)^2) / n,   y = (x - mean) / sqrt(variance + eps) * weight + bias

A forward sends two all-reduces over the data ranks (sums with the count, then squares), and backward one for each of
them. Running statistics get the unbiased variance, n / (n - 1) times this one. Every data rank computes the same
statistics, so every rank's running statistics stay the same without being sent.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from samestep.data.loader import Moment
from samestep.errors import UserError
from samestep.parallel.attributes import in_mode, wrap_forward
from samestep.parallel.collectives import all_reduce
from samestep.parallel.exact.forward_context import ForwardContext
from samestep.torch_internals.modules import AnyBatchNorm


def global_batch_norm(model: nn.Module, group: dist.ProcessGroup, forward_context: ForwardContext) -> None:
    """Make every batch norm of a model take its statistics over the ranks of `group`, in training steps."""
    without_sync(model)
    for name, module in model.named_modules():
        if isinstance(module, AnyBatchNorm):
            run = _forward if type(module).forward is AnyBatchNorm.forward else _own_forward
            wrap_forward(module, partial(run, module, name, group, forward_context))


def without_sync(model: nn.Module) -> None:
    """Replace the class of every SyncBatchNorm by one of a plain batch norm, which computes on any device."""
    for module in model.modules():
        if isinstance(module, nn.SyncBatchNorm):
            module.__class__ = _OfAnyDimensions  # pyright: ignore[reportAttributeAccessIssue]


def first_batch_norm(model: nn.Module) -> str | None:
    """A model's first batch norm, which needs a rank's samples of a step in one forward: its name and class.

    One that the model's own `train()` keeps in evaluation mode takes the statistics that it has, and needs none.
    """
    norms = (
        _described(name, module)
        for name, module in model.named_modules()
        if isinstance(module, AnyBatchNorm) and _takes_batch(module)
    )
    with in_mode(model, training=True):
        return next(norms, None)


def _takes_batch(norm: Any) -> bool:
    """Whether a batch norm normalizes by the rows that it is given; without statistics of its own it always does."""
    return norm.training or norm.running_mean is None


@contextmanager
def by_running_statistics(model: nn.Module) -> Iterator[None]:
    """Make training batch norms use their running statistics, if they have any, which decouples the samples."""
    norms = [module for module in model.modules() if isinstance(module, AnyBatchNorm)]
    before = {module: module.forward for module in norms}

    def uncoupled(forward: Callable[..., Tensor], *arguments: Any, **keywords: Any) -> Tensor:
        with _ByRunningStatistics():
            return forward(*arguments, **keywords)

    for module in norms:
        vars(module)["forward"] = partial(uncoupled, module.forward)
    try:
        yield
    finally:
        for module in norms:
            vars(module)["forward"] = before[module]


def _forward(
    module: Any,
    name: str,
    group: dist.ProcessGroup,
    forward_context: ForwardContext,
    forward: Callable[[Tensor], Tensor],
    input_: Tensor,
) -> Tensor:
    """A plain batch norm's forward, [samples, features, ...]: global statistics in training, its own elsewhere."""
    moment = forward_context.moment
    if not _takes_batch(module) or moment is None:
        return forward(input_)
    _check_whole(moment, name, module)
    # PyTorch's own kernel; with one data rank its statistics are the global batch's already.
    if dist.get_world_size(group) == 1:
        return _untracked(module, input_) if forward_context.recomputing else forward(input_)
    normed, mean, variance, count = _normed(input_, module.weight, module.bias, module.eps, group, moment)
    if module.track_running_stats and not forward_context.recomputing:
        module.num_batches_tracked.add_(1)
        # A mean over all steps: the number of them stays on the device, so that the host need not wait.
        momentum = module.num_batches_tracked.double().reciprocal() if module.momentum is None else module.momentum
        _track(module.running_mean, module.running_var, mean, variance, count, momentum)
    return normed


def _own_forward(
    module: Any,
    name: str,
    group: dist.ProcessGroup,
    forward_context: ForwardContext,
    forward: Callable[..., Tensor],
    *arguments: Any,
    **keywords: Any,
) -> Tensor:
    """Forward of a batch norm class with a custom forward, such as one that casts its input or appends a ReLU."""
    moment = forward_context.moment
    if not _takes_batch(module) or moment is None:
        return forward(*arguments, **keywords)
    tracked: Tensor | None = module.num_batches_tracked
    before = None if tracked is None else tracked.clone()
    try:
        # The custom forward runs unchanged; only its call of F.batch_norm is replaced.
        with _ByGlobalStatistics(name, module, group, forward_context, moment):
            return forward(*arguments, **keywords)
    finally:  # torch's checkpoint ends a recomputation by an exception once all saved tensors are recomputed
        if forward_context.recomputing and tracked is not None and before is not None:
            tracked.copy_(before)


def _described(name: str, module: nn.Module) -> str:
    # Only called for messages: names differ between blocks, so the compiler must not guard on them.
    return f"{name or 'the model'} ({type(module).__name__})"


def _check_whole(moment: Moment, name: str, module: nn.Module) -> None:
    """Raise UserError if a rank has several micro-batches, as no forward then has all of its samples."""
    if moment.micro_batches > 1:
        raise divided(_described(name, module), moment.micro_batches)


def divided(norm: str, micro_batches: int) -> UserError:
    """The error for a step of several micro-batches, of which a batch norm has one at a time."""
    return UserError(
        f"{norm} takes its statistics from the whole batch, and a step of {micro_batches} micro-batches a rank never "
        "has it at once; use run.micro_batch: null, group norm or layer norm"
    )


class _BatchNormCalls(TorchFunctionMode, ABC):
    """A mode that replaces calls of F.batch_norm."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        keywords = kwargs or {}
        return self.norm(*args, **keywords) if func is F.batch_norm else func(*args, **keywords)

    @abstractmethod
    def norm(
        self,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        """Replacement of F.batch_norm."""


class _ByGlobalStatistics(_BatchNormCalls):
    """Normalizes by statistics over all ranks of a group."""

    def __init__(
        self, name: str, module: nn.Module, group: dist.ProcessGroup, forward_context: ForwardContext, moment: Moment
    ) -> None:
        super().__init__()
        self._name = name
        self._module = module
        self._group = group
        self._recomputing = forward_context.recomputing
        self._moment = moment
        self._calls = 0

    def norm(
        self,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        if not training:
            return F.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
        _check_whole(self._moment, self._name, self._module)
        self._calls += 1
        if self._calls > 1:
            raise UserError(
                f"{_described(self._name, self._module)} takes batch norm more than once in a forward, such as of "
                "parts of the batch, of which every layout would have others; use one of the whole batch, group norm "
                "or layer norm"
            )
        if self._recomputing:
            # Temporary copies, so that as many tensors are saved for backward as in the original forward.
            running_mean = None if running_mean is None else running_mean.clone()
            running_var = None if running_var is None else running_var.clone()
        if dist.get_world_size(self._group) == 1:
            return F.batch_norm(input, running_mean, running_var, weight, bias, True, momentum, eps)
        normed, mean, variance, count = _normed(input, weight, bias, eps, self._group, self._moment)
        if running_mean is not None and running_var is not None:
            _track(running_mean, running_var, mean, variance, count, momentum)
        return normed


class _ByRunningStatistics(_BatchNormCalls):
    """Normalizes by running statistics; without any, by a mean of 0 and a variance of 1."""

    def norm(
        self,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        mean = input.new_zeros(input.shape[1]) if running_mean is None else running_mean
        variance = input.new_ones(input.shape[1]) if running_var is None else running_var
        return F.batch_norm(input, mean, variance, weight, bias, False, momentum, eps)


def _normed(
    input_: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: dist.ProcessGroup, moment: Moment
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Normalize [samples, features, ...]. Returns the result, the mean, the biased variance and the count."""
    centred, mean, variance, count = _statistics(input_, group, moment)
    shape = [1, -1, *(1 for _ in input_.shape[2:])]
    normed = centred * (variance + eps).rsqrt().view(shape)
    if weight is not None:
        normed = normed * weight.view(shape)
    if bias is not None:
        normed = normed + bias.view(shape)
    return normed.to(input_.dtype), mean, variance, count


def _statistics(input_: Tensor, group: dist.ProcessGroup, moment: Moment) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute statistics of [samples, features, ...]: the centred input, the mean, the biased variance, the count.

    Mean and variance are those of each feature over all ranks' samples; the count is the number of elements for each
    feature, not of samples.
    """
    # Zero-weight samples are counted by the rank they belong to; this rank still takes part in the all-reduce.
    weight = 0.0 if moment.zero_weight else 1.0
    # At least float32, as sums in 16 bits lose precision.
    numbers = input_.to(torch.promote_types(input_.dtype, torch.float32))
    # All dimensions but that of the features: [samples, features, places...].
    others = [dim for dim in range(input_.ndim) if dim != 1]
    shape = [1, -1, *(1 for _ in input_.shape[2:])]
    own = weight * input_.numel() / input_.size(1)
    count = numbers.new_full((1,), own)
    # [features + 1]: sums and the count in one message.
    sums = all_reduce(torch.cat([numbers.sum(others) * weight, count]), group)
    count = sums[-1].detach()
    if own <= 1 and count <= 1:  # a rank with two elements of its own need not wait for the sum
        raise UserError(
            f"batch norm: a global batch of one number for each of {input_.size(1)} features has no variance; use "
            "a recipe.batch that doesn't leave one sample for the last step"
        )
    mean = sums[:-1] / count  # [features]
    # Squares of the centred input, since E[x^2] - E[x]^2 would lose precision.
    centred = numbers - mean.view(shape)  # [samples, features, ...]
    squares = centred.square().sum(others) * weight  # [features]
    return centred, mean, all_reduce(squares, group) / count, count


def _track(
    running_mean: Tensor,
    running_var: Tensor,
    mean: Tensor,
    variance: Tensor,
    count: Tensor,
    momentum: float | Tensor,
) -> None:
    """Update the running statistics as PyTorch does, with the mean and the unbiased variance."""
    if isinstance(momentum, Tensor):
        momentum = momentum.to(running_mean)
    with torch.no_grad():
        running_mean.lerp_(mean.detach().to(running_mean), momentum)
        running_var.lerp_((variance.detach() * count / (count - 1)).to(running_var), momentum)


def _untracked(module: Any, input_: Tensor) -> Tensor:
    """Batch norm by this process's samples, without updating the running statistics."""
    # Temporary copies, since a recomputed layer must save as many tensors for backward as the original forward.
    statistics = [
        None if running is None else running.clone() for running in (module.running_mean, module.running_var)
    ]
    mean, variance = statistics
    return F.batch_norm(input_, mean, variance, module.weight, module.bias, training=True, eps=module.eps)


class _OfAnyDimensions(AnyBatchNorm):
    """Replacement of SyncBatchNorm, which PyTorch does not support on CPUs."""

    def _check_input_dim(self, input: Tensor) -> None:
        pass
