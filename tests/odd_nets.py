"""Nets that break the contract, or seem to: with parameters, gradients, norms and state of odd kinds."""

import random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Net(nn.Module):
    """Two linear layers; subclasses change what lies between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 16), nn.Linear(16, 3)

    def between(self, hidden: Tensor) -> Tensor:
        return hidden

    def forward(self, points: Tensor) -> Tensor:
        return self.last(self.between(self.first(points).tanh()))


class Centred(Net):
    """A norm over the batch, written by hand."""

    def between(self, hidden: Tensor) -> Tensor:
        return hidden - hidden.mean(0)


class PlainList(Net):
    def __init__(self) -> None:
        super().__init__()
        self.more = [nn.Linear(16, 16)]

    def between(self, hidden: Tensor) -> Tensor:
        return self.more[0](hidden)


class PlainDict(Net):
    def __init__(self) -> None:
        super().__init__()
        self.more = {"middle": [nn.Parameter(torch.ones(16))]}

    def between(self, hidden: Tensor) -> Tensor:
        return hidden * self.more["middle"][0]


class Counting(Net):
    """Keeps something from call to call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def between(self, hidden: Tensor) -> Tensor:
        self.calls += 1
        return hidden * self.calls


class Failing(Net):
    def between(self, hidden: Tensor) -> Tensor:
        return hidden @ hidden


class Sparse(Net):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 16, sparse=True)

    def between(self, hidden: Tensor) -> Tensor:
        return hidden + self.table(torch.zeros(len(hidden), dtype=torch.long))


class Unseeded(Net):
    """Initial weights from NumPy, which has no seed."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(np.random.rand(16), dtype=torch.float32))


class Written(Net):
    """Keeps its weights at one length, in place."""

    def between(self, hidden: Tensor) -> Tensor:
        self.last.weight.data.copy_(F.normalize(self.last.weight.data, dim=1))
        return hidden


class Followed(Net):
    """A moving average of a layer, which begins as its copy and is moved by every training forward."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = nn.Linear(4, 16).requires_grad_(False)
        self.slow.load_state_dict(self.first.state_dict())

    def between(self, hidden: Tensor) -> Tensor:
        if self.training:
            for mine, theirs in zip(self.slow.parameters(), self.first.parameters(), strict=True):
                mine.data.lerp_(theirs.data, 0.01)
        return hidden + self.slow.bias


class Renormed(Net):
    """A table whose rows are shortened as they are looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 16, max_norm=0.1)

    def between(self, hidden: Tensor) -> Tensor:
        return hidden + self.table((hidden[:, 0] > 0).long())


class Clamp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: Tensor) -> Tensor:
        return given.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient.clamp(-1e-2, 1e-2)


class Clamped(Net):
    """Gradients are clamped on their way."""

    def between(self, hidden: Tensor) -> Tensor:
        return Clamp.apply(hidden)  # pyright: ignore[reportReturnType]


class ClampedByHook(Net):
    def __init__(self) -> None:
        super().__init__()
        self.first.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))


class MaskedByHook(Net):
    """A hook that is right in any part of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first.weight.register_hook(lambda gradient: gradient * 0.5)


class NormedByBatch(Net):
    """Batch norm, whose coupling of samples every layout keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def between(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden)


class ReluNorm(nn.BatchNorm1d):
    """Batch norm with a forward of its own that goes on, as fused layers do."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.float()).relu().to(input.dtype)


class NormedAndMore(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = ReluNorm(16)

    def between(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden)


class Untracked(Net):
    """Batch norm without running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16, track_running_stats=False)

    def between(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden)


class GhostNorm(nn.BatchNorm1d):
    """Batch norm of each half by itself (Hoffer et al. 2017)."""

    def forward(self, input: Tensor) -> Tensor:
        return torch.cat([super(GhostNorm, self).forward(half) for half in input.chunk(2)])


class Ghost(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = GhostNorm(16)

    def between(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden)


class NotQuiteBatchNorm(nn.BatchNorm1d):
    def forward(self, input: Tensor) -> Tensor:
        return (input - input.mean(0)) * self.weight


class CentredByNorm(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = NotQuiteBatchNorm(16)

    def between(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden)


class ClippedParameter(Net):
    """Each backward's gradient is clipped by itself, whatever the micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.last.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))


class ScaledGradient(Net):
    def between(self, hidden: Tensor) -> Tensor:
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: gradient / gradient.norm())
        return hidden


class CentredBehindZeros(Net):
    """Couples samples, which the first loss does not show."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.last.weight)

    def between(self, hidden: Tensor) -> Tensor:
        return hidden - hidden.mean(0)


class PlainTensor(Net):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones(16, requires_grad=True)

    def between(self, hidden: Tensor) -> Tensor:
        return hidden * self.scale


class OwnGenerator(Net):
    """Initial weights from a generator of its own, which has no seed."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(np.random.default_rng().random(16), dtype=torch.float32))

    def between(self, hidden: Tensor) -> Tensor:
        return hidden * self.scale


class KeepsInputs(Net):
    """Takes a gradient by its inputs, as models of forces do, and remembers them."""

    def forward(self, points: Tensor) -> Tensor:
        with torch.enable_grad():
            self.points = points.detach().requires_grad_()
            output = super().forward(self.points)
            (slope,) = torch.autograd.grad(output.sum(), self.points, create_graph=True)
        return output + slope[:, :3]


class TwoOutputs(Net):
    def forward(self, points: Tensor) -> Any:
        hidden = self.first(points).tanh()
        return self.last(hidden), hidden


class Translator(nn.Module):
    """Predicts each token of a target from a mean over a source without its padding (number 0)."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target, self.last = nn.Embedding(7, 8), nn.Embedding(7, 8), nn.Linear(8, 7)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        real = (source != 0)[..., None]
        context = (self.source(source) * real).sum(1, keepdim=True) / real.sum(1, keepdim=True)
        return self.last((context + self.target(target)).tanh())  # [samples, tokens, vocabulary]


class NormedOverTokens(nn.Module):
    """Batch norm over tokens, padding (number 0) among them. `glances`: draws a number that decides nothing."""

    def __init__(self, *, glances: bool = False) -> None:
        super().__init__()
        self.glances = glances
        self.table, self.norm, self.last = nn.Embedding(7, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        if self.glances:
            random.random()
        hidden = self.norm(self.table(tokens).mT).mT  # [samples, tokens, features]
        real = (tokens != 0)[..., None]
        return self.last((hidden * real).sum(1) / real.sum(1))


class FixedPoint(Net):
    """Iterates until the worst sample of the batch has converged, as deep equilibrium models do."""

    def between(self, hidden: Tensor) -> Tensor:
        state = torch.zeros_like(hidden)
        for _ in range(60):
            state, before = (0.5 * state.sin() + hidden).tanh(), state
            if (state - before).abs().max() < 1e-7:
                break
        return state


class Balanced(Net):
    """Normalizes rows and columns in turn until they add up to one in all samples (Sinkhorn)."""

    def between(self, hidden: Tensor) -> Tensor:
        table = hidden.view(-1, 4, 4).exp()
        for _ in range(60):
            table = table / table.sum(1, keepdim=True)
            table = table / table.sum(2, keepdim=True)
            if torch.allclose(table.sum(1), table.new_ones(4), atol=1e-7, rtol=0):
                break
        return table.flatten(1)


class Refined(Net):
    """Halves the step of its integral while some sample of the batch is too inexact, as adaptive solvers do."""

    def between(self, hidden: Tensor) -> Tensor:
        area, steps, moving = hidden.cos(), 1, True
        while moving and steps < 300:
            steps, before = 2 * steps, area
            places = (torch.arange(steps, dtype=hidden.dtype) + 0.5) / steps
            area = (hidden[..., None] * places).cos().mean(-1)
            moving = len(torch.nonzero((area - before).abs() > 1e-6)) > 0
        return area


class AsksInVain(Net):
    """Asks for values of the batch that decide nothing, or where to a sample is sent."""

    def between(self, hidden: Tensor) -> Tensor:
        if not hidden.isfinite().all() or hidden.max().item() > 1e9:
            raise ValueError("too large")
        signs, result = hidden[:, 0] > 0, torch.zeros_like(hidden)
        for sign in signs.unique().tolist():
            rows = torch.nonzero(signs == sign)[:, 0]
            result = result.index_add(0, rows, hidden[rows] * (2 - sign))
        return result


class PartlyFrozen(Net):
    """Keeps a part in evaluation mode, in which it doesn't draw, as frozen batch norms and codebooks are."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.RReLU()

    def train(self, mode: bool = True) -> "PartlyFrozen":
        super().train(mode)
        self.frozen.eval()
        return self

    def between(self, hidden: Tensor) -> Tensor:
        return self.frozen(hidden)
