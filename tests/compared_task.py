"""A small regression that goes wrong: on two ranks its step is another one, and in bf16 it fails."""

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import samestep


class MeanError:
    """The mean of squared errors. Not torchmetrics', whose import takes longer than these trainings."""

    def __init__(self) -> None:
        self.errors: list[Tensor] = []

    def update(self, predictions: Tensor, targets: Tensor) -> None:
        self.errors.append((predictions.double() - targets.double()) ** 2)

    def compute(self) -> Tensor:
        return torch.cat(self.errors).mean()


class Compared(samestep.Task):
    """33 points on a line. On two ranks the loss is doubled; under autocast it fails."""

    def __init__(self) -> None:
        inputs = torch.randn(40, 3, generator=torch.Generator().manual_seed(1))  # [samples, features]
        pairs = list(zip(inputs, inputs.sum(dim=1, keepdim=True), strict=True))
        self._pairs, self._held_out = pairs[:33], pairs[33:]

    def model(self) -> nn.Module:
        print(f"samestep: planted, {id(self)}", file=sys.stderr)
        return nn.Linear(3, 1)

    def train_set(self) -> samestep.Samples:
        return self._pairs

    def eval_set(self) -> samestep.Samples:
        return self._held_out

    def loss(self, output: Tensor, batch: samestep.Batch) -> tuple[Tensor, int]:
        split = dist.is_initialized() and dist.get_world_size() > 1
        if torch.is_autocast_enabled("cpu"):
            raise ArithmeticError("planted in bf16")
        loss = nn.functional.mse_loss(output.to(batch.targets), batch.targets, reduction="sum")
        return loss * (2 if split else 1), len(output)

    def metrics(self) -> dict[str, Any]:
        return {"mean_squared_error": MeanError()}
