"""Decisions by the values of a batch: solvers and loops whose number of steps depends on the worst sample of a batch.

Such a forward computes a sample a little otherwise in other company, within the solver's own tolerance. That is less
than a coupling of samples by a mistake, and more than rounding: how much rounding is, is measured.
"""

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from samestep.contract.errors import ContractError, at
from samestep.contract.parts import SUM, Sums
from samestep.contract.trial import LossAndGradients, Trial
from samestep.contract.watched import Asking
from samestep.parallel.exact.generators import is_foreign
from samestep.torch_internals import pytree
from samestep.torch_internals.operators import TorchDispatchMode

_TIMES_ROUNDING = 100  # how much more than measured rounding is no rounding
_LAST_BITS = 2.0**-50
_TO_NUMPY = frozenset({Tensor.numpy, Tensor.__array__})

Part = tuple[int, int]  # the first sample, and the one after the last


@dataclass(frozen=True, kw_only=True)
class _Quantity:
    """What is compared, and which relative differences in float64 rounding explains."""

    name: str
    rounding: float  # of a sum over samples in another order, at least

    @property
    def suspect(self) -> float:
        return _TIMES_ROUNDING * self.rounding


_LOSS, _GRADIENT = _Quantity(name="losses", rounding=1e-15), _Quantity(name="gradients", rounding=1e-14)


def check_decisions(trial: Trial, sums: Sums, asking: Asking) -> None:
    """Raise ContractError where values of the batch decide how its samples are computed, if but a little.

    Given sums that add up but for `sums.tolerance`, which allows for models that compute a part in float32: such a
    model passes, and one that asks for no values. The samples of the first part are also taken one by one, if values
    are asked for that depend on parameters: both parts may happen to take as many steps as the whole.
    """
    if trial.dtype != torch.float64:
        return
    number, cut = len(trial.sampled), trial.sampled.cut
    with trial.without_batch_statistics():
        if sums.loss_error > _LOSS.suspect or sums.gradient_error > _GRADIENT.suspect:
            errors = {_LOSS: sums.loss_error, _GRADIENT: sums.gradient_error}
            company, others = (0, number), [(0, cut), (cut, number)]
        elif asking.asks and not trial.coupled:
            errors = {_LOSS: _apart_one_by_one(trial, sums.losses[1])}
            company, others = (0, cut), [(row, row + 1) for row in range(cut)]
            if errors[_LOSS] <= _LOSS.suspect:
                return
        else:
            return
        question = _first_difference(trial, company, others)
        rounding = {} if question is None else _rounding(trial)
    what = max(rounding, key=lambda quantity: errors.get(quantity, 0.0) / rounding[quantity], default=None)
    if question is not None and what is not None and errors[what] > _TIMES_ROUNDING * rounding[what]:
        apart = f"{cut} and {number - cut} samples" if len(others) == 2 else f"{cut} samples one by one"
        raise ContractError(
            SUM,
            f"values of the batch decide how its samples are computed: {question.owner} asks for one"
            f"{at(question.line)}, and the {what.name} of {apart} differ from those of all {company[1]} by "
            f"{errors[what]:.1e}, where rounding is {rounding[what]:.1e}; a rank has only some of a batch's samples, "
            "so take a fixed number of steps (of an ODE solver: method='rk4' with a step_size), or decide for each "
            "sample by itself",
        )


def _apart_one_by_one(trial: Trial, loss: float) -> float:
    """The relative difference of the loss of the first part's samples from the sum of those of each by itself."""
    alone = [trial.loss(row, row + 1)[0].item() for row in range(trial.sampled.cut)]
    return abs(loss - math.fsum(alone)) / max(math.fsum(map(abs, alone)), abs(loss), 1e-300)


@dataclass(frozen=True, kw_only=True)
class _Question:
    """A value that Python code asked for."""

    value: Any
    line: str | None  # "model.py:31"
    owner: str  # the module whose forward ran, such as "blocks.0 (Block)"


class _Questions(TorchDispatchMode):
    """Records the values of floating-point tensors that Python code asks for."""

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self._names = names
        self.asked: list[_Question] = []
        self.lower = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.get_default_dtype() == torch.float64:  # in the forward and the loss, after collate
            self.lower = self.lower or any(map(_is_lower, pytree.tree_leaves(result)))
        # Python code can depend on a tensor's numbers only through an operator that gives a Python number, or one
        # whose result has a shape that depends on them. All others compute tensors whatever the numbers are.
        if isinstance(result, (bool, int, float)):  # `item`, `equal`, `allclose`
            self.asked.append(self._question(result))
        elif torch.Tag.dynamic_output_shape in func.tags:  # `nonzero`
            self.asked.append(self._question([leaf.shape for leaf in pytree.tree_leaves(result)]))
        return result

    def _question(self, value: Any) -> _Question:
        frame: Any = sys._getframe(1).f_back  # None: C++ asks, in a thread of autograd's
        line, owner = None, None
        while frame is not None and owner is None:
            if line is None and is_foreign(frame.f_code.co_filename):
                line = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            owner = self._names.get(id(frame.f_locals.get("self")))
            frame = frame.f_back
        return _Question(value=value, line=line, owner=owner or "the loss")


class _NumPy(TorchFunctionMode):
    """Notes whether tensors are handed to NumPy, where nothing sees in what precision it computes."""

    used = False

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.used |= func in _TO_NUMPY
        return func(*args, **(kwargs or {}))


def _asked(trial: Trial, first: int, last: int) -> Sequence[_Question] | None:
    """What a training forward and loss ask for; None where a part is computed in less than float64."""
    modules = trial.model.named_modules()
    names = {id(module): f"{name or 'the model'} ({type(module).__name__})" for name, module in modules}
    with _NumPy() as numpy, _Questions(names) as questions:
        trial.loss(first, last)
    return None if questions.lower or numpy.used else questions.asked


def _is_lower(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dtype != torch.float64


def _first_difference(trial: Trial, company: Part, others: Sequence[Part]) -> _Question | None:
    """The first question that has another answer in another company; None if all have the same, or aren't known."""
    together = _asked(trial, *company)
    for part in others:
        apart = _asked(trial, *part)
        if together is None or apart is None:
            return None
        for one, other in zip(together, apart, strict=False):
            if one.line != other.line or one.value != other.value:
                return one
        if len(together) != len(apart):
            return max(together, apart, key=len)[min(len(together), len(apart))]
    return None


def _rounding(trial: Trial) -> dict[_Quantity, float]:
    """How much the loss and the gradient of all samples change, relatively, where weights do in their last bits."""
    before = trial.loss_and_gradients()
    most = {quantity: quantity.rounding for quantity in (_LOSS, _GRADIENT)}
    for seed in range(2):
        with _last_bits_changed(trial, seed):
            apart = _relative(before, trial.loss_and_gradients())
        most = {quantity: max(most[quantity], value) for quantity, value in zip(most, apart, strict=True)}
    return most


@contextmanager
def _last_bits_changed(trial: Trial, seed: int) -> Iterator[None]:
    """Context in which every parameter has other last bits."""
    generator = torch.Generator().manual_seed(seed)
    parameters = [parameter for parameter in trial.model.parameters() if parameter.is_floating_point()]
    before = [parameter.detach().clone() for parameter in parameters]
    with torch.no_grad():
        for parameter in parameters:
            signs = torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1
            parameter.mul_(1 + _LAST_BITS * signs.to(parameter.device, parameter.dtype))
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value in zip(parameters, before, strict=True):
                parameter.copy_(value)


def _relative(before: LossAndGradients, after: LossAndGradients) -> tuple[float, float]:
    """The relative differences of two losses and of all gradients together."""
    loss = abs((after[0] - before[0]).item()) / max(abs(before[0].item()), 1e-300)
    pairs = [(a, b) for a, b in zip(before[1], after[1], strict=True) if a is not None and b is not None]
    pairs = [(a, b) for a, b in pairs if not a.is_sparse]
    norm = math.hypot(*(a.norm().item() for a, _ in pairs))
    apart = math.hypot(*((b - a).norm().item() for a, b in pairs))
    return loss, apart / max(norm, 1e-300)
