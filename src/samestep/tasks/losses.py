"""Losses of a task that are more than one sum over samples: losses that couple samples, and several losses.

A loss that couples samples, such as a contrastive one, compares each sample with all others of the batch, of which a
rank has some. Such a task gives its loss a third parameter:

    def loss(self, output, batch, gather=samestep.alone):
        images, texts = output  # [samples of this call, width] each
        all_texts = gather(texts)  # [samples of the global batch, width], in the global batch's order
        logits = images @ all_texts.T
        return F.cross_entropy(logits, gather.rows(images), reduction="sum"), len(images)

The loss is called for each micro-batch on each rank, and gives the terms of that micro-batch's samples. What it
gathers is the same in every call, and gradients flow through it to the samples of all ranks and micro-batches.

Several losses are named terms, each a sum with a count of its own, and a weight. The loss of a step is the sum over
the terms of weight * sum / count, where sums and counts are those of the global batch. Backward adds all terms'
gradients together, after which none can be divided by itself. So each term's global count must be known before.
"""

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import FunctionType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from samestep.data.types import Batch
from samestep.errors import UserError
from samestep.tasks.base import sum_and_count

if TYPE_CHECKING:
    from torch import Tensor

_PARAMETER = "gather"  # of a loss that couples samples
# What is known of functions: every step asks, and to read a signature takes as long as a small layer's forward.
_known: WeakKeyDictionary[FunctionType, bool] = WeakKeyDictionary()


class Gather:
    """The `gather` argument of a loss. This one is for a process with the whole batch in one call."""

    def __call__(self, nest: Any) -> Any:
        """Gather the rows of the global batch, in its order, for a nest of tensors.

        Every tensor has one row a sample, [samples of this call, ...], and becomes [samples of the batch, ...].
        Every call of the loss in a step must gather tensors of the same kinds, in the same order.
        """
        return nest

    def rows(self, tensor: "Tensor") -> "Tensor":
        """Return the indices, among the gathered rows, of this call's samples. [samples of this call], int64

        `tensor` is any with one row a sample; the result is on its device.
        """
        import torch

        return torch.arange(len(tensor), device=tensor.device)


alone = Gather()


def takes_gather(loss: Callable[..., Any]) -> bool:
    """Whether a loss couples the samples of a batch, which its parameter `gather` says."""
    loss = getattr(loss, "function", loss)  # of a TaskLoss
    function = getattr(loss, "__func__", loss)  # of a method, of which there is another object each time
    if not isinstance(function, FunctionType):
        return _names_gather(loss)
    takes = _known.get(function)
    if takes is None:
        takes = _known[function] = _names_gather(loss)
    return takes


def _names_gather(loss: Callable[..., Any]) -> bool:
    """Whether a callable has the parameter; False if its signature can't be read."""
    try:
        return _PARAMETER in inspect.signature(loss).parameters
    except (TypeError, ValueError):  # a callable without a signature
        return False


@dataclass(frozen=True, kw_only=True)
class TaskLoss:
    """A task's loss as a trainer calls it: the only wrapper around the function that the user wrote.

    What may be done around the user's function is declared here, so that no other wrapper has to look through this
    one: terms and weights, who is told of its errors, and an injected fault.
    """

    function: Callable[..., Any]
    weights: Mapping[str, float] = field(default_factory=dict)  # of the terms that the function names; empty: one sum
    errors: Callable[[], AbstractContextManager[None]] = nullcontext  # entered around each call of the function
    nonfinite: bool = False  # a fault injection: each sum becomes NaN

    def terms(self, output: Any, batch: Batch, **gather: Any) -> "dict[str, tuple[Tensor, Tensor | int]]":
        """The terms of a batch, in the order of the weights. Raises UserError where the function gives others."""
        with self.errors():
            result = self.function(output, batch, **gather)
        if not self.weights:
            terms = {"loss": sum_and_count(result)}
        elif not isinstance(result, Mapping):
            raise UserError(
                f"loss_weights names {', '.join(self.weights)}, and the loss gave a {type(result).__name__}; use a "
                "mapping of these names to pairs of a sum and a count"
            )
        elif result.keys() != self.weights.keys():
            raise UserError(
                f"loss_weights names {', '.join(self.weights)}, and the loss gave {', '.join(map(str, result))}; use "
                "the same names"
            )
        else:
            terms = {name: sum_and_count(result[name]) for name in self.weights}
        if self.nonfinite:
            return {name: (value * float("nan"), count) for name, (value, count) in terms.items()}
        return terms

    def __call__(self, output: Any, batch: Batch, **gather: Any) -> "tuple[Tensor, Tensor | int]":
        """The weighted sum over the terms' sums, and the sum of their counts: what adds up over parts of a batch."""
        terms = self.terms(output, batch, **gather)
        if not self.weights:
            return terms["loss"]
        total = sum((self.weights[name] * value for name, (value, _) in terms.items()), start=0)
        return total, sum((count for _, count in terms.values()), start=0)  # pyright: ignore[reportReturnType]

    def terms_of_whole_batch(self, output: Any, batch: Batch) -> "dict[str, tuple[Tensor, Tensor | int]]":
        """The terms where one call has the whole batch, so that a loss that couples samples gathers nothing."""
        return self.terms(output, batch, **({"gather": alone} if takes_gather(self) else {}))

    def of_whole_batch(self, output: Any, batch: Batch) -> "tuple[Tensor, Tensor | int]":
        """The loss of a step with only this batch; of several terms, each is divided by its own count."""
        terms = self.terms_of_whole_batch(output, batch)
        if not self.weights:
            return terms["loss"]
        parts = [self.weights[name] * value / _at_least_one(count) for name, (value, count) in terms.items()]
        return sum(parts, start=0), 1  # pyright: ignore[reportReturnType]


def _at_least_one(count: "Tensor | int") -> "Tensor | int":
    """A count to divide by: a term without any samples in a batch has the sum 0, and must not become NaN."""
    return max(count, 1) if isinstance(count, (int, float)) else count.clamp(min=1)


def task_loss(loss: Callable[..., Any], weights: Mapping[str, float] | None = None) -> TaskLoss:
    """A loss as trainers take it; one that is already is returned. Raises UserError for what are not weights."""
    if isinstance(loss, TaskLoss):
        return loss
    weights = {} if weights is None else weights
    if not isinstance(weights, Mapping):
        raise UserError(f"loss_weights is a {type(weights).__name__}; use a mapping of the terms' names to numbers")
    for name, weight in weights.items():
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or weight != weight:
            raise UserError(f'loss_weights: "{name}" has the weight {weight!r}; use a number')
    return TaskLoss(function=loss, weights=dict(weights))
