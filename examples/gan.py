"""A GAN whose critic has a gradient penalty: points around eight centres on a circle (Gulrajani et al. 2017)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import samestep

NOISE, SPREAD = 4, 0.05


def net(inputs: int, outputs: int, width: int) -> nn.Module:
    layers = [nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, outputs)]
    return nn.Sequential(*layers)


class Rivals(nn.Module):
    """Both nets; `turn` says whose turn of the step it is. Without it, in evaluation, the samples are noise."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.generator, self.critic = net(NOISE, 2, width), net(2, 1, width)

    def forward(self, samples: Tensor, turn: str | None = None) -> Any:
        if turn is None:
            return self.generator(samples)
        made = self.generator(torch.randn(len(samples), NOISE, dtype=samples.dtype, device=samples.device))
        if turn == "generator":
            return self.critic(made)
        share = torch.rand(len(samples), 1, dtype=samples.dtype, device=samples.device)
        between = (share * samples + (1 - share) * made.detach()).requires_grad_()
        return self.critic(samples), self.critic(made.detach()), between, self.critic(between)


class Eight(samestep.InTurns):
    """Points around eight centres. Arguments come from `args:`."""

    def __init__(self, *, points: int = 4096, width: int = 128, penalty: float = 0.1) -> None:
        generator = torch.Generator().manual_seed(0)
        angle = torch.arange(8) * torch.pi / 4
        self.centres = torch.stack([angle.cos(), angle.sin()], 1)  # [8, 2]
        which = torch.randint(8, (points,), generator=generator)
        self.points = self.centres[which] + SPREAD * torch.randn(points, 2, generator=generator)
        self.width, self.penalty = width, penalty

    def model(self) -> nn.Module:
        return Rivals(self.width)

    def train_set(self) -> samestep.Samples:
        return [(point, 0) for point in self.points]

    def eval_set(self) -> samestep.Samples:
        return [(row, 0) for row in torch.randn(1000, NOISE, generator=torch.Generator().manual_seed(1))]

    def turns(self) -> Sequence[samestep.Turn]:
        return [
            samestep.Turn(name="critic", parameters=["critic.*"], loss=self.tell_apart),
            samestep.Turn(name="generator", parameters=["generator.*"], loss=self.deceive, every=2),
        ]

    def tell_apart(self, output: tuple[Tensor, ...], batch: samestep.Batch) -> tuple[Tensor, int]:
        real, made, between, score = output  # [samples, 1], [samples, 1], [samples, 2], [samples, 1]
        (slope,) = torch.autograd.grad(score.sum(), between, create_graph=True)
        return (made - real + self.penalty * (slope.norm(dim=1, keepdim=True) - 1) ** 2).sum(), len(real)

    def deceive(self, output: Tensor, batch: samestep.Batch) -> tuple[Tensor, int]:
        return -output.sum(), len(output)

    def metrics(self) -> "dict[str, Near | Centres]":
        return {"near_a_centre": Near(self.centres), "centres": Centres(self.centres)}

    def scores(self, output: Tensor, batch: samestep.Batch) -> tuple[Tensor, Tensor]:
        return output, batch.targets


class Near:
    """The share of the points that are made which lie within four standard deviations of a centre."""

    def __init__(self, centres: Tensor) -> None:
        self.centres = centres
        self.made: list[Tensor] = []

    def update(self, made: Tensor, _: Tensor) -> None:
        self.made.append(made)

    def compute(self) -> Any:
        return (self.distances().min(1).values < 4 * SPREAD).double().mean()

    def distances(self) -> Tensor:
        made = torch.cat(self.made)
        return torch.cdist(made, self.centres.to(made))  # [points, 8]


class Centres(Near):
    """How many centres have at least a twentieth of the points that are made."""

    def compute(self) -> int:
        return int((self.distances().argmin(1).bincount(minlength=8) >= len(self.distances()) / 20).sum())
