"""The update by its rule: what AdamW or SGD must make of the parameters and the state that a step left.

Beside a reference in float64 a step in bfloat16 shows little: rounding moves gradients by a hundredth. What the
optimizer made of its gradient does not depend on that rounding. The gradient is read off the state (of Adam's
first average m it is (m' - b1 m) / (1 - b1)), and the recipe's rule, computed here in float64, says what the second
average and the parameter must be then. An optimizer keeps these in float32, so a wrong decay, eps, beta or rate
is seen in bfloat16 as it is in float32.

Rules: AdamW, Loshchilov & Hutter 2019, algorithm 2; SGD with momentum as torch.optim.SGD has it.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from samestep.engines.base import Trainer
from samestep.recipe import SGD, AdamW, Recipe
from samestep.training.optimizer import rate

_TIMES = 8.0  # the rounding of single operations passes
_FEWEST_TO_DECAY = 2  # dimensions; biases and norms have one
_TINY = 1e-30  # float32 has no smaller squares, but for those without all digits

State = Mapping[str, Tensor]  # by the optimizer's key


@dataclass(frozen=True, kw_only=True)
class UpdateFound:
    """How far an update is from the rule, by what rounding may make of it: 1 is what is allowed."""

    worst: float
    parameter: str


@dataclass(frozen=True, kw_only=True)
class Before:
    """A parameter before a step, and the state of it."""

    value: Tensor
    state: State
    steps: int  # that it has taken


class UpdateRule:
    """Holds each step of a trainer against the recipe's rule."""

    keys = ("exp_avg", "exp_avg_sq", "momentum_buffer")

    def __init__(self, recipe: Recipe, total_steps: int, trainer: Trainer) -> None:
        """Before the first step. Every rank makes one."""
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
        """None where no state could be read, or no rule is known."""
        return self._worst

    def after_step(self) -> None:
        """Look at the step that was just taken. Every rank asks."""
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
    """What judges an update by its rule; None for a recipe whose rule isn't written here."""
    optimizer = recipe.optimizer
    if recipe.groups:
        return None
    if isinstance(optimizer, AdamW):
        return lambda before, now, state, lr: adamw_apart(optimizer, before, now, state, lr)
    if isinstance(optimizer, SGD) and optimizer.momentum:
        return lambda before, now, state, lr: sgd_apart(optimizer, before, now, state, lr)
    return None


def adamw_apart(rule: AdamW, before: Before, now: Tensor, state: State, lr: float) -> float:
    """How far one step of AdamW is from its rule."""
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
    """How far one step of SGD with momentum is from its rule; decay is in the gradient, which is not known here."""
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
    """A parameter beside what it must be: (1 - decay) before - update."""
    start, end = before.double(), now.double()
    unit = _half_step(now)
    allowed = unit * (start.abs() + end.abs()) + 4 * _half_step(torch.empty(0)) * update.abs() + _TINY
    return _times(end - ((1 - decay) * start - update), allowed)


def _times(apart: Tensor, allowed: Tensor) -> float:
    """The largest difference as a multiple of what is allowed; infinite for NaN."""
    if not apart.numel():
        return 0.0
    worst = (apart.abs() / (_TIMES * allowed)).max().item()
    return math.inf if math.isnan(worst) else worst


def _half_step(value: Tensor) -> float:
    """By how much the value's type rounds a number, relative to it."""
    return torch.finfo(value.dtype).eps / 2
