"""Checks an optimizer's update against its rule: AdamW or SGD recomputed in float64 from the state after a step.

A comparison of a bfloat16 step with float64 is not sensitive: rounding changes gradients by about one per cent. How
the optimizer applies its gradient does not depend on that rounding. So the gradient is recovered from the state (from
Adam's first moment m as (m' - b1 m) / (1 - b1)), and the recipe's rule, computed here in float64, gives the second
moment and the parameter. An optimizer keeps these in float32, so a wrong decay, eps, beta or learning rate shows in
bfloat16 as it does in float32.

Rules: AdamW, Loshchilov & Hutter 2019, algorithm 2; SGD with momentum as torch.optim.SGD has it.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from samestep.engines.base import Trainer
from samestep.recipe import SGD, AdamW, Recipe
from samestep.training.schedule import rate

_TIMES = 8.0  # tolerance, in multiples of the rounding of single operations
_FEWEST_TO_DECAY = 2  # dimensions; biases and norms have one
_TINY = 1e-30  # squares below this are subnormal, or nearly so, in float32

State = Mapping[str, Tensor]  # by the optimizer's key


@dataclass(frozen=True, kw_only=True)
class UpdateFound:
    """Largest deviation of an update from the rule, as a multiple of what rounding allows: above 1 is a fault."""

    worst: float
    parameter: str


@dataclass(frozen=True, kw_only=True)
class Before:
    """A parameter and its optimizer state before a step."""

    value: Tensor
    state: State
    steps: int  # taken so far


class UpdateRule:
    """Compares each step of a trainer with the recipe's rule."""

    keys = ("exp_avg", "exp_avg_sq", "momentum_buffer")

    def __init__(self, recipe: Recipe, total_steps: int, trainer: Trainer) -> None:
        """Copy the parameters before the first step; every rank must construct one."""
        self._recipe = recipe
        self._total_steps = total_steps
        self._trainer = trainer
        self._taken = 0
        self._before: dict[str, Before] = {}
        self._worst: UpdateFound | None = None
        values = {name: value.detach().cpu().clone() for name, value in trainer.parameters()}
        self._before = {name: Before(value=value, state={}, steps=0) for name, value in values.items()}

    @property
    def found(self) -> UpdateFound | None:
        """The worst deviation so far; None where the state can't be read, or the rule is not implemented here."""
        return self._worst

    def after_step(self) -> None:
        """Check the step that was just taken; every rank must call it."""
        lr = self._recipe.optimizer.lr
        judge = _judge_of(self._recipe)
        states: dict[str, dict[str, Tensor]] = {}
        for name, key, value in self._trainer.optimizer_state(self.keys):
            states.setdefault(name, {})[key] = value.detach().cpu().clone()
        if judge is None or lr is None or not states:
            return
        lr *= rate(self._recipe.schedule, self._total_steps, self._taken)
        self._taken += 1
        for name, value in self._trainer.parameters():
            before, state = self._before.get(name), states.get(name)
            if before is None or state is None or value.is_complex():
                continue
            now = value.detach().cpu().clone()
            still = now.equal(before.value) and all(state[key].equal(old) for key, old in before.state.items())
            if still and before.state:
                continue  # it had no gradient
            apart = judge(before, now, state, lr)
            if self._worst is None or not apart <= self._worst.worst:
                self._worst = UpdateFound(worst=apart, parameter=name)
            self._before[name] = Before(value=now, state=state, steps=before.steps + 1)


Judge = Callable[[Before, Tensor, State, float], float]


def _judge_of(recipe: Recipe) -> Judge | None:
    """The function that checks an update against its rule; None for a recipe whose rule is not implemented here."""
    optimizer = recipe.optimizer
    if recipe.groups:
        return None
    if isinstance(optimizer, AdamW):
        return lambda before, now, state, lr: adamw_apart(optimizer, before, now, state, lr)
    if isinstance(optimizer, SGD) and optimizer.momentum:
        return lambda before, now, state, lr: sgd_apart(optimizer, before, now, state, lr)
    return None


def adamw_apart(rule: AdamW, before: Before, now: Tensor, state: State, lr: float) -> float:
    """Deviation of one AdamW step from its rule, as a multiple of the allowed rounding."""
    if not state.keys() >= {"exp_avg", "exp_avg_sq"}:
        return math.inf
    beta1, beta2 = rule.betas
    m, v = state["exp_avg"].double(), state["exp_avg_sq"].double()
    m0 = before.state["exp_avg"].double() if before.state else torch.zeros_like(m)
    v0 = before.state["exp_avg_sq"].double() if before.state else torch.zeros_like(v)
    unit = _half_step(state["exp_avg"])
    gradient = (m - beta1 * m0) / (1 - beta1)
    apart_gradient = unit * (m.abs() + m0.abs() + gradient.abs() * (1 - beta1)) / (1 - beta1)
    squares = beta2 * v0 + (1 - beta2) * gradient.square()
    allowed = (1 - beta2) * (2 * gradient.abs() + apart_gradient) * apart_gradient + unit * (v + v0) + _TINY
    steps = before.steps + 1
    size = (v / (1 - beta2**steps)).sqrt() + rule.eps
    update = lr * (m / (1 - beta1**steps)) / size
    decay = rule.weight_decay if rule.decay_all or now.dim() >= _FEWEST_TO_DECAY else 0.0
    return max(_times(v - squares, allowed), _parameter(before.value, now, decay * lr, update))


def sgd_apart(rule: SGD, before: Before, now: Tensor, state: State, lr: float) -> float:
    """Deviation of one SGD step with momentum from its rule; the momentum buffer, taken as given, holds the decay."""
    if "momentum_buffer" not in state:
        return math.inf
    buffer = state["momentum_buffer"].double()
    step = buffer
    if rule.nesterov:
        old = before.state["momentum_buffer"].double() if before.state else torch.zeros_like(buffer)
        gradient = buffer - rule.momentum * old if before.state else buffer
        step = gradient + rule.momentum * buffer
    return _parameter(before.value, now, 0.0, lr * step)


def _parameter(before: Tensor, now: Tensor, decay: float, update: Tensor) -> float:
    """Deviation of a parameter from (1 - decay) * before - update, as a multiple of the allowed rounding."""
    start, end = before.double(), now.double()
    unit = _half_step(now)
    allowed = unit * (start.abs() + end.abs()) + 4 * _half_step(torch.empty(0)) * update.abs() + _TINY
    return _times(end - ((1 - decay) * start - update), allowed)


def _times(apart: Tensor, allowed: Tensor) -> float:
    """The largest ratio of a difference to the allowed one; infinite for NaN."""
    if not apart.numel():
        return 0.0
    worst = (apart.abs() / (_TIMES * allowed)).max().item()
    return math.inf if math.isnan(worst) else worst


def _half_step(value: Tensor) -> float:
    """The unit roundoff of a tensor's dtype: half of eps."""
    return torch.finfo(value.dtype).eps / 2
