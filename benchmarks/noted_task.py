"""The small task of benchmarks/hosts.py and benchmarks/recovery.py, whose ranks record the time of each step."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from notes import note
from torch import Tensor, nn

import samestep


class Slow(samestep.Task):
    """A dense net on random samples; with a folder, each step is recorded there, and takes at least `seconds`."""

    def __init__(self, *, folder: str | None = None, seconds: float = 0.0) -> None:
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(1024, 16, generator=generator)
        self._pairs = [(x, x.sum().reshape(1)) for x in inputs]
        self._folder = Path(folder) if folder is not None else None
        self._seconds = seconds
        self._steps = 0

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))

    def train_set(self) -> Any:
        return self._pairs

    def eval_set(self) -> None:
        return None

    def loss(self, output: Tensor, batch: samestep.Batch) -> tuple[Tensor, int]:
        if self._folder is not None:
            note(self._folder, dist.get_rank(), self._steps, self._seconds)
            self._steps += 1
        return nn.functional.mse_loss(output, batch.targets, reduction="sum"), len(output)

    def metrics(self) -> dict[str, Any]:
        return {}
