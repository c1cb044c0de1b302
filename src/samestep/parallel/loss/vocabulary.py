"""Vocabulary parallel: slices the output layer by the vocabulary, and computes the loss on slices of the logits.

Logits [batch, tokens, vocabulary] are often a model's largest tensor. With slices [batch, tokens, vocabulary / p],
cross-entropy needs only three values per token from the other ranks, each [batch, tokens]: the largest logit, the sum
of exponentials, and the target's logit (Shoeybi et al. 2019, section 3). PyTorch's `loss_parallel` computes it on
DTensors. All ranks try once, in the first step, whether the task's own loss works on DTensors.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from samestep.comm.messages import largest
from samestep.data.types import Batch
from samestep.parallel import collectives
from samestep.parallel.attributes import replace_forward
from samestep.parallel.loss.chunked_logits import ChunkedLogits
from samestep.parallel.sharding import whole
from samestep.parallel.tensor.layers import product_of, with_bias
from samestep.parallel.valueless import has_values
from samestep.tasks.losses import TaskLoss
from samestep.torch_internals import pytree

Backward = Callable[[Tensor], None]


class Vocabulary:
    """Decides whether output layers return whole logits or, in training, slices of them as DTensors."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh  # of the tensor axis
        self._group = mesh.get_group()
        self._decided = False
        self.able = False  # whether the model's own forward works with logits in slices
        self.slices = False  # whether training forwards return logits in slices

    def output(self, linear: nn.Module, lengths: list[int]) -> None:
        """Make an output layer compute its slice of the logits."""
        product = product_of(linear)
        slices = collectives.Slices(group=self._group, lengths=lengths)

        def forward(x: Tensor) -> Tensor:
            # [..., vocabulary / ranks].
            logits = with_bias(product(collectives.copy_to_region(x, self._group)), linear)
            if self.slices and torch.is_grad_enabled():
                shape = torch.Size([*logits.shape[:-1], sum(lengths)])  # of the whole logits
                # `from_local` needs the stride as well if a shape is given.
                stride = torch.empty(shape, device="meta").stride()
                # The slices are DTensor's own, so it needs no message to learn the other ranks' sizes.
                return DTensor.from_local(logits, self._mesh, [Shard(-1)], shape=shape, stride=stride)
            return collectives.gather_from_region(logits, slices, -1)

        replace_forward(linear, forward)

    def backward(self, backward: Backward) -> Backward:
        """Return a backward that also goes through a loss on slices."""
        return partial(_in_slices, backward)

    def loss(self, loss: TaskLoss, output: Any, batch: Batch) -> tuple[Tensor, Tensor | int]:
        """Compute a task's loss: on slices if it was found to work on them, else on whole logits."""
        leaves = pytree.tree_leaves(output)
        if any(isinstance(leaf, ChunkedLogits) for leaf in leaves):  # chunks of slices, if the output layer is sliced
            return _plain(_in_slices(loss, output, batch))
        if not any(isinstance(leaf, DTensor) for leaf in leaves):
            return loss(output, batch)
        if not self._decided:
            self.able = self.slices = self._can_take_slices(loss, output, batch)
            self._decided = True
        if not self.slices:
            return loss(_whole(output), batch)
        return _plain(_in_slices(loss, output, batch))

    def _can_take_slices(self, loss: TaskLoss, output: Any, batch: Batch) -> bool:
        """Try whether a loss and its gradient are the same on slices as on whole logits; the same on all ranks."""
        apart = pytree.tree_map_only(Tensor, _apart, output)
        together = pytree.tree_map_only(Tensor, lambda tensor: _apart(whole(tensor.detach())), apart)
        try:
            expected, _ = loss(together, batch)
            expected.backward()
            on_slices, _ = _plain(_in_slices(loss, apart, batch))
            _in_slices(on_slices.backward)
        except (RuntimeError, NotImplementedError, TypeError, ValueError, AssertionError):
            alike = False  # it fails on slices, or on whole logits too, which then raise in the step
        else:
            gradients = [
                (sliced.grad, complete.grad)
                for sliced, complete in zip(pytree.tree_leaves(apart), pytree.tree_leaves(together), strict=True)
                if isinstance(sliced, DTensor)
            ]
            alike = near(on_slices.detach(), expected.detach()) and all(
                sliced is not None and complete is not None and near(whole(sliced), complete)
                for sliced, complete in gradients
            )
        return agree(alike, self._group, torch.device(self._mesh.device_type))


def near(values: Tensor, other: Tensor) -> bool:
    """Whether two computations of the same values differ by rounding only, in their dtype; True without values."""
    if not (has_values(values) and has_values(other)):
        return True
    # About 2e-10 in float64 and 6e-4 in float32: larger than the difference of sums in another order, smaller than
    # that of a wrong slice.
    tolerance = 100 * torch.finfo(values.dtype).eps ** 0.75
    apart = torch.where(values == other, 0.0, values - other).abs()  # masked logits are infinite in both
    size = other.abs().masked_fill(other.isinf(), 0.0)
    return bool(apart.max() <= tolerance * (size.max() + tolerance)) if values.numel() else True


def agree(answer: bool, group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether `answer` is True on all ranks of a group; a collective."""
    return largest([int(not answer)], group, device.type) == [0]


def _in_slices(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function with PyTorch's cross-entropy computed on slices, in forward and in backward."""
    context: AbstractContextManager[Any] = loss_parallel()
    with context, _TargetsInRange():
        return function(*arguments)


class _TargetsInRange(TorchFunctionMode):
    """Makes cross-entropy raise IndexError for a target out of range, as it does on whole logits."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is F.cross_entropy or func is F.nll_loss:
            call = inspect.signature(func).bind(*args, **(kwargs or {}))
            call.apply_defaults()
            logits, target, *_ = call.arguments.values()
            _check_targets(logits, target, call.arguments["ignore_index"])
        return func(*args, **(kwargs or {}))


def _check_targets(logits: Tensor, target: Tensor, ignored: int) -> None:
    """Raise IndexError for a target outside the vocabulary, which is in no rank's slice."""
    classes = logits.shape[1 if logits.ndim > 1 else 0]
    if target.is_floating_point() or target.device.type != "cpu":  # probabilities, or the check would synchronize
        return
    target = whole(target)
    if not has_values(target):
        return
    wrong = target[(target != ignored) & ((target < 0) | (target >= classes))]
    if len(wrong):
        raise IndexError(f"Target {int(wrong[0])} is out of bounds.")


def _apart(tensor: Tensor) -> Tensor:
    """The tensor detached from its graph, as a leaf with its own gradient if it is floating-point."""
    tensor = tensor.detach()
    return tensor.requires_grad_() if tensor.is_floating_point() else tensor


def _whole(output: Any) -> Any:
    return pytree.tree_map_only(DTensor, whole, output)


def _plain(pair: tuple[Tensor, Tensor | int]) -> tuple[Tensor, Tensor | int]:
    """The sum and the count of a loss as plain tensors."""
    return _whole(pair[0]), _whole(pair[1])
