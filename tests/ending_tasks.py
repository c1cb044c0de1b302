"""Tasks whose ranks end, or are ended, in ways that are no exception."""

import os
import signal
import sys
import time
from pathlib import Path

import torch.distributed as dist
from small_tasks import Unscored
from torch import Tensor

import samestep


class Ending(Unscored):
    """Rank 1 ends in its `call`th loss: by an exit, or by a signal that it sends to itself or to its server."""

    def __init__(self, *, how: str, call: int = 3) -> None:
        super().__init__()
        self.how, self.call, self.calls = how, call, 0

    def loss(self, output: Tensor, batch: samestep.Batch) -> tuple[Tensor, Tensor | int]:
        self.calls += 1
        if self.calls == self.call and dist.get_rank() == dist.get_world_size() - 1:
            self.end()
        return super().loss(output, batch)

    def end(self) -> None:
        kind, _, name = self.how.partition(" ")
        if kind == "os._exit":
            os._exit(int(name))
        if kind == "sys.exit":
            sys.exit(int(name))
        if kind == "raise":
            raise KeyboardInterrupt
        # The server that ranks are forked from is their parent.
        os.kill(os.getppid() if kind == "server" else os.getpid(), signal.Signals[name])
        time.sleep(60)  # until it is ended


class Slow(Unscored):
    """Its losses take their time, and tell by a file that they have begun."""

    def __init__(self, *, seconds: float, begun: str) -> None:
        super().__init__()
        self.seconds, self.begun = seconds, begun

    def loss(self, output: Tensor, batch: samestep.Batch) -> tuple[Tensor, Tensor | int]:
        (Path(self.begun) / f"begun-{dist.get_rank()}-{os.getpid()}").touch()
        time.sleep(self.seconds)
        return super().loss(output, batch)
