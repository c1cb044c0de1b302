"""Checks what a custom training loop passes to its session, and remakes its optimizers for the spread model."""

import inspect
from collections.abc import Iterator, Sequence, Sized
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn
from torch.optim import Optimizer

from samestep.data.loader import StepBatch
from samestep.errors import UserError
from samestep.limits import MOST
from samestep.parallel.optimizer.joined import Joined, OptimizerMember
from samestep.parallel.optimizer.kinds import Shapes
from samestep.parallel.optimizer.offloaded import BY_NUMBER
from samestep.tasks.base import check_samples
from samestep.training.model_checks import check_memory, check_model, lazy_modules


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
    for member in several:
        if not isinstance(member, Optimizer):
            raise UserError(
                f"session.prepare: the optimizer is {_named(member)}; use a torch.optim.Optimizer of the model's "
                "parameters"
            )
        if member.state:
            raise UserError("session.prepare: the optimizer has stepped already; give it before its first step")


def check_dealt(samples: Any, collate: Any, what: str, **numbers: Any) -> None:
    """Raise UserError for samples or a collate from which no batches can be made, and for `numbers` below 1."""
    check_samples(samples, f"{what}(samples)")
    if not callable(collate):
        raise UserError(f"{what}: collate is {_named(collate)}; use a function from samples to samestep.Batch")
    for name, number in numbers.items():
        if number is not None and not (type(number) is int and 0 < number <= MOST):
            raise UserError(f"{what}: {name} is {number!r}; use a whole number of 1 or more, {MOST:,} at most")


def check_lengths(lengths: Any, samples: Sized, what: str) -> NDArray[np.int64]:
    """Convert the samples' lengths to an array. Raises UserError unless they are one integer per sample."""
    try:
        numbers = np.asarray(lengths)
    except ValueError:  # rows of different lengths
        numbers = np.empty((), dtype=object)
    if numbers.shape != (len(samples),) or not np.issubdtype(numbers.dtype, np.integer) or (numbers < 0).any():
        raise UserError(
            f"{what}: lengths is {_named(lengths)} of shape {list(numbers.shape)}; use {len(samples)} whole numbers, "
            "the length of each sample"
        )
    return numbers.astype(np.int64)


def check_step(batch: Any, loss: Any) -> None:
    """Raise UserError if `batch` is not from the session's batches, or `loss` is not a function."""
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


class OwnOptimizers:
    """The custom loop's optimizers; called with the parameters that a rank holds, returns one optimizer of them."""

    def __init__(self, optimizers: Optimizer | Sequence[Optimizer], model: nn.Module) -> None:
        self._given = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        seen: set[str] = set()
        self._names: list[list[list[str]]] = []
        for optimizer in self._given:
            held = [[names.get(id(p)) for p in group["params"]] for group in optimizer.param_groups]
            if unknown := sum(name is None for group in held for name in group):
                raise UserError(f"session.prepare: the optimizer has {unknown} parameters that the model has not")
            group_names = [[name for name in group if name is not None] for group in held]
            for name in (name for group in group_names for name in group):
                if name in seen:
                    raise UserError(f"session.prepare: two optimizers have {name}; give each parameter to one")
                seen.add(name)
            self._names.append(group_names)
        self._shapes = shapes

    def __call__(self, parameters: Iterator[tuple[str, nn.Parameter]]) -> Optimizer:
        """Replace the parameters in the optimizers' groups by those that now have the same names."""
        now = dict(parameters)
        members = []
        for optimizer, names in zip(self._given, self._names, strict=True):
            settings = [{n: v for n, v in group.items() if n != "params"} for group in optimizer.param_groups]
            for group, held in zip(optimizer.param_groups, names, strict=True):
                group["params"] = [now[name] for name in held if name in now]  # a pipeline rank holds only some
            whole = [
                Shapes(settings=setting, shapes=[self._shapes[name] for name in held])
                for setting, held in zip(settings, names, strict=True)
                if held
            ]
            title = f"the optimizer {type(optimizer).__name__}"
            members.append(
                OptimizerMember(title=title, make=partial(_again, optimizer), groups=whole, optimizer=optimizer)
            )
        (first, *others) = self._given
        if not others and type(first) in BY_NUMBER:
            return first
        return Joined(members, lr=float(first.param_groups[0].get("lr", 0.0)))


def _again(optimizer: Optimizer, groups: Sequence[dict[str, Any]]) -> Optimizer:
    """Make an optimizer of the same class and settings over other parameters."""
    accepted = inspect.signature(type(optimizer)).parameters
    settings: dict[str, Any] = {name: value for name, value in optimizer.defaults.items() if name in accepted}
    try:
        return type(optimizer)(list(groups), **settings)  # pyright: ignore[reportCallIssue]
    except TypeError as error:
        raise UserError(
            f"session.prepare: another {type(optimizer).__name__} can't be made of its defaults: {error}; keep what "
            "it takes in its defaults"
        ) from error


def no_schedule(optimizer: Optimizer) -> None:
    """No schedule: a custom loop advances its own."""
