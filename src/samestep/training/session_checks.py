"""What a loop of one's own hands to its session, checked where it is handed over."""

from collections.abc import Sequence, Sized
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn
from torch.optim import Optimizer

from samestep.data.loader import StepBatch
from samestep.errors import UserError
from samestep.tasks.base import check_samples
from samestep.training.built_model import check_memory, check_model, lazy_modules


def check_prepared(model: nn.Module, optimizer: Optimizer | Sequence[Optimizer]) -> None:
    """Raise UserError for a model or an optimizer that can't be spread."""
    check_model(model, "session.prepare")
    check_memory(model, "session.prepare")
    if lazy := lazy_modules(model):
        raise UserError(
            f"session.prepare: {lazy[0]} has no shape yet; call the model once with a few samples before, under the "
            "same seed on every rank"
        )
    several = optimizer if isinstance(optimizer, (list, tuple)) and optimizer else [optimizer]
    for each in several:
        if not isinstance(each, Optimizer):
            raise UserError(
                f"session.prepare: the optimizer is {_named(each)}; use a torch.optim.Optimizer of the model's "
                "parameters"
            )
        if each.state:
            raise UserError("session.prepare: the optimizer has stepped already; give it before its first step")


def check_dealt(samples: Any, collate: Any, what: str, **numbers: Any) -> None:
    """Raise UserError for samples, a collate or numbers above 0 with which no batches can be made."""
    check_samples(samples, f"{what}(samples)")
    if not callable(collate):
        raise UserError(f"{what}: collate is {_named(collate)}; use a function from samples to samestep.Batch")
    for name, number in numbers.items():
        if number is not None and not (isinstance(number, int) and number > 0):
            raise UserError(f"{what}: {name} is {number!r}; use a whole number of 1 or more")


def check_lengths(lengths: Any, samples: Sized, what: str) -> NDArray[np.int64]:
    """The samples' lengths as an array; raises UserError where they are not a whole number for each sample."""
    try:
        found = np.asarray(lengths)
    except ValueError:  # rows of unlike lengths
        found = np.empty((), dtype=object)
    if found.shape != (len(samples),) or not np.issubdtype(found.dtype, np.integer) or (found < 0).any():
        raise UserError(
            f"{what}: lengths is {_named(lengths)} of shape {list(found.shape)}; use {len(samples)} whole numbers, "
            "the length of each sample"
        )
    return found.astype(np.int64)


def check_step(batch: Any, loss: Any) -> None:
    """Raise UserError for what is no batch of the session's, or no loss."""
    if not isinstance(batch, StepBatch):
        raise UserError(
            f"session.step: the batch is {_named(batch)}; use what `for batch in session.batches(...)` gives"
        )
    if not callable(loss):
        raise UserError(
            f"session.step: the loss is {_named(loss)}; use a function loss(output, batch) of a sum and a count"
        )


def _named(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
