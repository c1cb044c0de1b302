"""Optimizers of one's own, as users write them: some are right on any slice, some must see whole parameters."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class Each(Optimizer):
    """Steps every parameter by a function of its value, its gradient and a rate."""

    def __init__(self, params: Any, *, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # pyright: ignore
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.change(parameter, parameter.grad, group)

    def change(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        raise NotImplementedError


class Lars(Each):
    """A tensor's step is as long as the tensor; the count of steps is a number of Python's."""

    def change(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        state["steps"] = state.get("steps", 0) + 1
        state.setdefault("sum", torch.zeros_like(parameter)).add_(gradient)
        trust = parameter.norm() / (state["sum"].norm() + 1e-6)
        parameter.sub_(state["sum"] * trust * group["lr"] / state["steps"] ** 0.5)


class Counting(Each):
    """Keeps its count in its groups, where no checkpoint looks."""

    def change(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        group["count"] = group.get("count", 0) + 1
        parameter.sub_(gradient * group["lr"])


class Noisy(Each):
    """Langevin's noise."""

    def change(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        parameter.sub_((gradient + torch.randn_like(gradient)) * group["lr"])


class Together(Optimizer):
    """One length of step for all parameters."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # pyright: ignore
        given = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = sum(p.grad.square().sum() for p in given if p.grad is not None) ** 0.5
        for parameter in given:
            parameter.sub_(parameter.grad * self.param_groups[0]["lr"] / norm)  # pyright: ignore


def signs(params: Sequence[Any], lr: float = 0.01, momentum: float = 0.9) -> Optimizer:
    """A function that makes an optimizer."""
    return torch.optim.SGD(params, lr=lr, momentum=momentum)


def nothing(params: Sequence[Any], lr: float = 0.01) -> None:
    """What is no optimizer."""
