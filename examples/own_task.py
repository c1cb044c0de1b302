"""A task of one's own: which of three spiral arms is a point on?"""

import torch
from torch import Tensor, nn

import samestep


class Accuracy:
    """The share of right answers. Any object with `update` and `compute` does, such as torchmetrics' metrics."""

    def __init__(self) -> None:
        self._right = self._seen = 0

    def update(self, scores: Tensor, classes: Tensor) -> None:
        self._right += int((scores.argmax(dim=-1) == classes).sum())
        self._seen += len(classes)

    def compute(self) -> float:
        return self._right / self._seen


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

    def loss(self, output: Tensor, batch: samestep.Batch) -> tuple[Tensor, int]:
        return nn.functional.cross_entropy(output, batch.targets, reduction="sum"), len(output)

    def metrics(self) -> dict[str, Accuracy]:
        return {"accuracy": Accuracy()}
