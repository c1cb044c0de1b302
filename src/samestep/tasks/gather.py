"""Gather: how the loss of a task that couples samples gets the rows of the whole batch.

A contrastive loss compares each sample with all others of the batch, of which a rank has some. Such a task gives its
loss a third parameter:

    def loss(self, output, batch, gather=samestep.alone):
        images, texts = output  # [samples of this call, width] each
        all_texts = gather(texts)  # [samples of the global batch, width], in the global batch's order
        logits = images @ all_texts.T
        return F.cross_entropy(logits, gather.rows(images), reduction="sum"), len(images)

It is called for each micro-batch on each rank, and gives the terms of that micro-batch's samples. What it gathers is
the same wherever it is called, and gradients flow through it to the samples of all ranks and micro-batches.
"""

import inspect
from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from torch import Tensor

_PARAMETER = "gather"  # of a loss that couples samples
# What is known of functions: every step asks, and to read a signature takes as long as a small layer's forward.
_known: WeakKeyDictionary[FunctionType, bool] = WeakKeyDictionary()


class Gather:
    """What a loss gets as `gather`. This one is of a process that has the whole batch in one call."""

    def __call__(self, nest: Any) -> Any:
        """The same nest of tensors with the rows of the global batch, in its order.

        Every tensor has one row a sample, [samples of this call, ...], and becomes [samples of the batch, ...].
        Every call of the loss in a step must gather tensors of the same kinds, in the same order.
        """
        return nest

    def rows(self, tensor: "Tensor") -> "Tensor":
        """Which rows of what was gathered are those of this call's samples. [samples of this call], int64

        `tensor` is any with one row a sample; the result is on its device.
        """
        import torch

        return torch.arange(len(tensor), device=tensor.device)


alone = Gather()


def of_whole_batch(loss: Callable[..., Any]) -> Callable[..., Any]:
    """A loss that is called with the whole batch at once."""
    return partial(loss, gather=alone) if takes_gather(loss) else loss


def takes_gather(loss: Callable[..., Any]) -> bool:
    """Whether a loss couples the samples of a batch, which its parameter `gather` says."""
    loss = getattr(loss, "function", loss)  # of several terms
    function = getattr(loss, "__func__", loss)  # of a method, of which there is another object each time
    if not isinstance(function, FunctionType):
        return _names_gather(loss)
    known = _known.get(function)
    if known is None:
        known = _known[function] = _names_gather(loss)
    return known


def _names_gather(loss: Callable[..., Any]) -> bool:
    try:
        return _PARAMETER in inspect.signature(loss).parameters
    except (TypeError, ValueError):  # a callable without a signature
        return False
