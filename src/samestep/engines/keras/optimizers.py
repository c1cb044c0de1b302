"""PyTorch's update rules written with TensorFlow's operators.

Keras's own differ: its Adam adds eps before it corrects the second moment's bias, its SGD decays apart from the
gradient, and its momentum holds the learning rates of earlier steps.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from samestep.engines.base import OptimizerOf
from samestep.errors import UserError

Settings = Mapping[str, Any]  # a PyTorch optimizer's group: betas, eps, momentum, ...

# (TensorFlow, variable, gradient, state, learning rate, which step from 1, settings); float64 where they are numbers.
Apply = Callable[[Any, Any, Any, Sequence[Any], Any, Any, Settings], None]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """How one step changes a parameter, and how many tensors of its shape it keeps for that."""

    state: Callable[[Settings], int]
    apply: Apply


def _adamw(
    tf: Any, variable: Any, gradient: Any, state: Sequence[Any], rate: Any, step: Any, settings: Settings
) -> None:
    """Loshchilov & Hutter 2019, algorithm 2."""
    first, second = state
    beta_1, beta_2 = settings["betas"]
    dtype = variable.dtype
    variable.assign(variable * tf.cast(1 - rate * settings["weight_decay"], dtype))
    mean = first.assign(first + (gradient - first) * (1 - beta_1))
    square = second.assign(second * beta_2 + tf.square(gradient) * (1 - beta_2))
    correction_1, correction_2 = (1 - tf.pow(tf.constant(beta, tf.float64), step) for beta in (beta_1, beta_2))
    deviation = tf.sqrt(square) / tf.cast(tf.sqrt(correction_2), dtype) + settings["eps"]
    variable.assign_sub(mean / deviation * tf.cast(rate / correction_1, dtype))


def _sgd(
    tf: Any, variable: Any, gradient: Any, state: Sequence[Any], rate: Any, step: Any, settings: Settings
) -> None:
    """Sutskever et al. 2013, with PyTorch's order: decay into the gradient, the rate outside of the momentum."""
    if settings["weight_decay"]:
        gradient = gradient + variable * settings["weight_decay"]
    if state:
        (buffer,) = state
        moving = buffer.assign(buffer * settings["momentum"] + gradient)
        gradient = gradient + moving * settings["momentum"] if settings["nesterov"] else moving
    variable.assign_sub(gradient * tf.cast(rate, variable.dtype))


RULES: Mapping[type[Optimizer], Rule] = {
    torch.optim.AdamW: Rule(state=lambda settings: 2, apply=_adamw),
    torch.optim.SGD: Rule(state=lambda settings: 1 if settings["momentum"] else 0, apply=_sgd),
}


@dataclass(frozen=True, kw_only=True)
class Groups:
    """A PyTorch optimizer without tensors, whose groups say what each parameter's rule is given."""

    optimizer: Optimizer
    rule: Rule
    group_of: Mapping[str, int]  # by the name of each parameter that is trained

    @classmethod
    def of(cls, model: nn.Module, optimizer_of: OptimizerOf) -> "Groups":
        """The groups that a model's parameters fall into; the optimizer gets stand-ins without memory."""
        empty = {
            name: nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
            for name, parameter in model.named_parameters()
        }
        optimizer = optimizer_of(iter(empty.items()))
        if type(optimizer) not in RULES:
            there = ", ".join(sorted(kind.__name__ for kind in RULES))
            raise UserError(f"engine keras: no {type(optimizer).__name__} in TensorFlow here; there are {there}")
        names = {id(parameter): name for name, parameter in empty.items()}
        group_of = {
            names[id(parameter)]: number
            for number, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
        }
        return cls(optimizer=optimizer, rule=RULES[type(optimizer)], group_of=group_of)

    def settings(self, name: str) -> Settings:
        return self.optimizer.param_groups[self.group_of[name]]

    def states(self, name: str) -> int:
        """How many tensors of its shape a parameter keeps; none where it is not trained."""
        return self.rule.state(self.settings(name)) if name in self.group_of else 0

    def rates(self) -> list[float]:
        """The learning rate of each group in the step to come."""
        return [group["lr"] for group in self.optimizer.param_groups]
