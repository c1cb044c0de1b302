"""Tasks whose steps are taken in turns, as those of GANs are; for tests."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import samestep


class Rivals(nn.Module):
    """A generator of points and a discriminator that tells them from real ones."""

    def __init__(self, dropout: float = 0.1, norm: bool = False, noise: bool = True, bias: bool = True) -> None:
        """`noise`: the generator begins with random numbers; else with the real points. `bias`: of its layers."""
        super().__init__()
        self.noise = noise
        norms = [nn.BatchNorm1d(16)] if norm else []
        self.generator = nn.Sequential(
            nn.Linear(4, 16, bias=bias),
            *norms,
            nn.GELU(),
            nn.Linear(16, 16, bias=bias),
            nn.GELU(),
            nn.Linear(16, 2, bias=bias),
        )
        self.discriminator = nn.Sequential(
            nn.Linear(2, 16),
            nn.LeakyReLU(0.2),
            nn.Dropout(dropout),
            nn.Linear(16, 16),
            nn.LeakyReLU(0.2),
            nn.Linear(16, 1),
        )

    def forward(self, real: Tensor, turn: str | None = None) -> Any:
        fake = self.generator(torch.randn(len(real), 4).to(real) if self.noise else real.repeat(1, 2))
        if turn == "discriminator":
            return self.discriminator(real), self.discriminator(fake.detach())
        return self.discriminator(fake)


class Gan(samestep.InTurns):
    """Points on a ring."""

    def __init__(self, *, every: int = 1, norm: bool = False) -> None:
        generator = torch.Generator().manual_seed(5)
        angle = 6.2832 * torch.rand(96, generator=generator)
        self.points = torch.stack([angle.cos(), angle.sin()], 1)
        self.every, self.norm = every, norm

    def model(self) -> nn.Module:
        return Rivals(norm=self.norm)

    def train_set(self) -> samestep.Samples:
        return [(point, torch.tensor(0)) for point in self.points]

    def turns(self) -> Sequence[samestep.Turn]:
        return [
            samestep.Turn(
                name="discriminator",
                parameters=["discriminator.*"],
                loss=self.tell_apart,
                optimizer=samestep.AdamW(lr=0.02, betas=(0.5, 0.9)),
            ),
            samestep.Turn(name="generator", parameters=["generator.*"], loss=self.deceive, every=self.every),
        ]

    def tell_apart(self, output: Any, batch: samestep.Batch) -> tuple[Tensor, int]:
        real, fake = output
        return F.softplus(-real).sum() + F.softplus(fake).sum(), len(real)

    def deceive(self, output: Any, batch: samestep.Batch) -> tuple[Tensor, int]:
        return F.softplus(-output).sum(), len(output)


class Unlike(Gan):
    """Each turn has an optimizer of another kind; the generator's layers are matrices alone, as Muon wants them."""

    def __init__(self, critic: Any, generator: Any, *, every: int = 2) -> None:
        super().__init__(every=every)
        self.optimizers = {"discriminator": critic, "generator": generator}

    def model(self) -> nn.Module:
        return Rivals(bias=False)

    def turns(self) -> Sequence[samestep.Turn]:
        return [replace(turn, optimizer=self.optimizers[turn.name]) for turn in super().turns()]


class Restless(torch.optim.Optimizer):
    """Moves its parameters in each of its steps, also those without a gradient."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["mean"] = 0.9 * state.get("mean", torch.zeros_like(parameter))
                if parameter.grad is not None:
                    state["mean"] += parameter.grad
                parameter -= group["lr"] * state["mean"]


class Detached(Gan):
    """The generator's loss is of points that are cut from its graph."""

    def model(self) -> nn.Module:
        return Cut()


class Cut(Rivals):
    def forward(self, real: Tensor, turn: str | None = None) -> Any:
        if turn != "generator":
            return super().forward(real, turn)
        return self.discriminator(self.generator(torch.randn(len(real), 4).to(real)).detach())


class Penalized(Gan):
    """The critic's gradient at points between real and made ones is held at a length of 1 (Gulrajani et al. 2017)."""

    def model(self) -> nn.Module:
        return Critic(dropout=0.0)

    def tell_apart(self, output: Any, batch: samestep.Batch) -> tuple[Tensor, int]:
        real, fake, between, score = output
        (slope,) = torch.autograd.grad(score.sum(), between, create_graph=True)
        return (fake - real + 10 * (slope.norm(dim=1, keepdim=True) - 1) ** 2).sum(), len(real)

    def deceive(self, output: Any, batch: samestep.Batch) -> tuple[Tensor, int]:
        return -output.sum(), len(output)


class Critic(Rivals):
    def forward(self, real: Tensor, turn: str | None = None) -> Any:
        fake = self.generator(torch.randn(len(real), 4).to(real))
        if turn != "discriminator":
            return self.discriminator(fake)
        share = torch.rand(len(real), 1).to(real)
        between = (share * real + (1 - share) * fake.detach()).requires_grad_()
        return self.discriminator(real), self.discriminator(fake.detach()), between, self.discriminator(between)


class PenalizedInForward(Penalized):
    """The same, with the gradient taken in the forward."""

    def model(self) -> nn.Module:
        return CriticWithSlope(dropout=0.0)

    def tell_apart(self, output: Any, batch: samestep.Batch) -> tuple[Tensor, int]:
        real, fake, slope = output
        return (fake - real + 10 * (slope.norm(dim=1, keepdim=True) - 1) ** 2).sum(), len(real)


class CriticWithSlope(Critic):
    def forward(self, real: Tensor, turn: str | None = None) -> Any:
        if turn != "discriminator":
            return super().forward(real, turn)
        real_score, fake_score, between, score = super().forward(real, turn)
        (slope,) = torch.autograd.grad(score.sum(), between, create_graph=True)
        return real_score, fake_score, slope
