"""Tasks whose losses take gradients of gradients: penalties on the slope of the model; for tests."""

from typing import Any

import torch
from coupled_tasks import Layer, Pairs
from torch import Tensor, nn

import samestep


class Steep(nn.Module):
    """Layers with one number for each sample, and the inputs that the slope is taken of."""

    def __init__(self, layers: int = 2, norm: bool = False) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 16)
        self.norm = nn.BatchNorm1d(16) if norm else nn.Identity()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.last = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Any:
        x = x.detach().requires_grad_(torch.is_grad_enabled())
        hidden = self.norm(self.embed(x))
        for layer in self.layers:
            hidden = layer(hidden)
        return self.last(hidden), x


class Sloping(Steep):
    """Its forward gives the slope, too. `graph`: which it also computes where nobody wants a backward."""

    def __init__(self, *, norm: bool, graph: bool) -> None:
        super().__init__(norm=norm)
        self.graph = graph

    def forward(self, x: Tensor) -> Any:
        if not self.training:
            return super().forward(x)[0], None
        with torch.set_grad_enabled(torch.is_grad_enabled() or self.graph):
            x = x.detach().requires_grad_(True)
            hidden = self.norm(self.embed(x))
            for layer in self.layers:
                hidden = layer(hidden)
            score = self.last(hidden)
            return score, torch.autograd.grad(score.sum(), x, create_graph=True)[0]


class Smooth(Pairs):
    """A regression whose slope is held at a length of 1 (Gulrajani et al. 2017, equation 3)."""

    def __init__(self, *, layers: int = 2, norm: bool = False) -> None:
        super().__init__(samples=60)
        self.layers, self.norm = layers, norm

    def model(self) -> nn.Module:
        return Steep(self.layers, self.norm)

    def train_set(self) -> samestep.Samples:
        return [(a, b[:1]) for (a, b), _ in self.samples]

    def eval_set(self) -> samestep.Samples | None:
        return None

    def loss(self, output: Any, batch: samestep.Batch, **_: Any) -> tuple[Tensor, int]:  # pyright: ignore
        score, x = output
        (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        return ((score - batch.targets).square() + (slope.norm(dim=1, keepdim=True) - 1) ** 2).sum(), len(score)


class SmoothForward(Smooth):
    """The same regression of a model that gives its slope itself."""

    def __init__(self, *, norm: bool = False, graph: bool = False) -> None:
        super().__init__(norm=norm)
        self.graph = graph

    def model(self) -> nn.Module:
        return Sloping(norm=self.norm, graph=self.graph)

    def loss(self, output: Any, batch: samestep.Batch, **_: Any) -> tuple[Tensor, int]:
        score, slope = output
        return ((score - batch.targets).square() + (slope.norm(dim=1, keepdim=True) - 1) ** 2).sum(), len(score)


class SmoothTogether(SmoothForward):
    """Beside it each score is held against the batch's mean."""

    def loss(self, output: Any, batch: samestep.Batch, gather: samestep.Gather) -> tuple[Tensor, int]:  # pyright: ignore
        total, count = super().loss(output, batch)
        return total + (output[0] - gather(output[0]).mean()).square().sum(), count
