"""The smallest training whose checkpoints have every kind of file: few operations, so that each can be tried."""

import torch
from torch import Tensor, nn

import samestep


class OneLayer(samestep.Task):
    """Random points in two classes, told apart by one layer."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        points = torch.randn(40, 4, generator=generator)
        self.pairs = list(zip(points, (points[:, 0] > 0).long(), strict=True))

    def model(self) -> nn.Module:
        return nn.Linear(4, 2)

    def train_set(self) -> samestep.Samples:
        return self.pairs

    def loss(self, output: Tensor, batch: samestep.Batch) -> tuple[Tensor, int]:
        return nn.functional.cross_entropy(output, batch.targets, reduction="sum"), len(output)
