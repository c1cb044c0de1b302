"""The small job of benchmarks/hosts.py, whose ranks note when they take each step."""

import os
import socket
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import samestep

STEP_SECONDS = 0.05  # at least


def note(folder: Path, step: int) -> None:
    """Leave a line in this process's file: when, which step."""
    time.sleep(STEP_SECONDS)
    with (folder / f"steps-{socket.gethostname()}-{os.getpid()}").open("a", encoding="ascii") as file:
        file.write(f"{time.time()} {step}\n")


class Slow(samestep.Task):
    """A dense net on random samples; with a folder, each step is noted there."""

    def __init__(self, *, folder: str | None = None) -> None:
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(1024, 16, generator=generator)
        self._pairs = [(x, x.sum().reshape(1)) for x in inputs]
        self._folder = Path(folder) if folder is not None else None
        self._steps = 0

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))

    def train_set(self) -> Any:
        return self._pairs

    def eval_set(self) -> None:
        return None

    def loss(self, output: Tensor, batch: samestep.Batch) -> tuple[Tensor, int]:
        if self._folder is not None:
            note(self._folder, self._steps)
            self._steps += 1
        return nn.functional.mse_loss(output, batch.targets, reduction="sum"), len(output)

    def metrics(self) -> dict[str, Any]:
        return {}
