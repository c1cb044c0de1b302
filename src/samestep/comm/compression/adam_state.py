"""AdamW's state, for methods that take Adam's step themselves: read and written where the optimizer keeps it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


@dataclass(frozen=True, kw_only=True)
class AdamEntry:
    """One parameter, its two averages, and the settings of its group."""

    parameter: Tensor
    gradient: Tensor | None
    momentum: Tensor  # exp_avg
    variance: Tensor  # exp_avg_sq
    steps: Tensor  # that the optimizer has counted; a number
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float

    @property
    def new_momentum(self) -> Tensor:
        """The momentum updated with this rank's gradient; without a gradient it only decays."""
        decayed = self.momentum * self.betas[0]
        return decayed if self.gradient is None else decayed.add_(self.gradient, alpha=1 - self.betas[0])

    def divisor(self, renewals: float) -> Tensor:
        """sqrt(bias-corrected variance) + eps; infinite where the variance is zero, as one bit can't encode a zero.

        `renewals`: how many gradients the variance is made of (Kingma & Ba 2015, section 3).
        """
        unbiased = self.variance / max(1 - self.betas[1] ** renewals, 1e-300)
        return unbiased.sqrt_().add_(self.eps).masked_fill_(self.variance == 0, float("inf"))


def adam_entries(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> Iterator[AdamEntry]:
    """Yield the Adam state of each parameter, in this order; missing state is created."""
    groups = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    for parameter in parameters:
        state: dict[str, Any] = optimizer.state[parameter]
        if "exp_avg" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(parameter.detach())
            state["exp_avg_sq"] = torch.zeros_like(parameter.detach())
        group = groups[id(parameter)]
        yield AdamEntry(
            parameter=parameter.detach(),
            gradient=parameter.grad,
            momentum=state["exp_avg"],
            variance=state["exp_avg_sq"],
            steps=state["step"],
            lr=float(group["lr"]),
            betas=group["betas"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
        )
