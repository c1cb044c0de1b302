"""A task of one's own: which of three spiral arms is a point on?"""

import torch
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

import samestep


class Spirals(samestep.Task):
    """Points of three spiral arms with some noise; a small net learns the arm. Arguments come from `args:`."""

    def __init__(self, *, points: int = 3000, hidden: int = 64) -> None:
        generator = torch.Generator().manual_seed(0)
        arm = torch.arange(points) % 3
        radius = torch.rand(points, generator=generator)
        angle = 4 * radius + arm * 2.1 + 0.2 * torch.randn(points, generator=generator)
        place = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)  # [points, 2]
        self.samples = list(zip(place, arm, strict=True))
        self.hidden = hidden

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, self.hidden), nn.Tanh(), nn.Linear(self.hidden, 3))

    def train_set(self) -> samestep.Samples:
        return self.samples[300:]

    def eval_set(self) -> samestep.Samples:
        return self.samples[:300]

    def loss(self, output: torch.Tensor, batch: samestep.Batch) -> tuple[torch.Tensor, int]:
        return nn.functional.cross_entropy(output, batch.targets, reduction="sum"), len(output)

    def metrics(self) -> dict[str, MulticlassAccuracy]:
        return {"accuracy": MulticlassAccuracy(num_classes=3, average="micro")}
