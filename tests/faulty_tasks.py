"""Tasks whose ranks fail by themselves, which no key of a job file asks for."""

import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from small_tasks import Points
from torch import Tensor

import samestep


class Stopped(Points):
    """Rank 1 stops itself, as a debugger or SIGSTOP from elsewhere would, in its `call`th loss."""

    def __init__(self, *, call: int) -> None:
        super().__init__()
        self.call, self.calls = call, 0

    def loss(self, output: Tensor, batch: samestep.Batch) -> tuple[Tensor, Tensor | int]:
        self.calls += 1
        if self.calls == self.call and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().loss(output, batch)


class Poisoned(Points):
    """One sample's first coordinate is infinite."""

    def __init__(self, *, sample: int, dropout: float = 0.0) -> None:
        super().__init__(dropout=dropout)
        point, label = self.pairs[sample]
        point = torch.cat([torch.tensor([float("inf")]), point[1:]])
        self.pairs[sample] = (point, label)


class Counted(Points):
    """Leaves a file for each time that a rank is started, and then makes a user's mistake."""

    def __init__(self, *, folder: str) -> None:
        super().__init__()
        self.folder = folder

    def loss(self, output: Tensor, batch: samestep.Batch) -> tuple[Tensor, Tensor | int]:
        if dist.get_rank() == 0:
            (Path(self.folder) / f"start-{os.getpid()}").touch()
        raise samestep.UserError("the user's fault, seen late")
