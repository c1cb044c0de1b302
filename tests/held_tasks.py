"""Tasks that wait in the middle of a training, as files say that all hosts see."""

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from small_tasks import Points, Slow, Unscored
from torch import Tensor

import samestep
from samestep.fault_tolerance.status import Counts, entered_collectives

_LONGER_THAN_ANY_TEST = 300.0  # seconds
_LONGEST_COPY = 60.0  # seconds, of a few kilobytes


class HeldBack(Slow):
    """Of two ranks the second one doesn't come, once, to the all-reduce of gradients in which the first one waits.

    Each leaves a file in `folder`, rank-0 and rank-1, that says how many collectives it has entered: the second one
    as it stays behind in its `call`th loss, the first one when it waits in that step's backward.
    """

    def __init__(self, *, folder: str, call: int, **slow: Any) -> None:
        super().__init__(**slow)
        self.folder, self.call, self.calls = Path(folder), call, 0

    def loss(self, output: Tensor, batch: samestep.Batch) -> tuple[Tensor, Tensor | int]:
        self.calls += 1
        if self.calls == self.call and dist.get_world_size() == 2:
            file = self.folder / f"rank-{dist.get_rank()}"
            if not file.exists():
                self._hold(file)
        return super().loss(output, batch)

    def _hold(self, file: Path) -> None:
        if dist.get_rank() == 1:
            _leave(file, entered_collectives(), "its own loss")
            time.sleep(_LONGER_THAN_ANY_TEST)
        else:
            about = file, threading.get_ident(), entered_collectives()
            threading.Thread(target=_tell_when_it_waits, args=about, daemon=True).start()


def _tell_when_it_waits(file: Path, thread: int, before: Counts) -> None:
    """Leave the file when the thread is in backward and has entered the collective of its gradients."""
    while True:
        time.sleep(0.02)
        entered, frame = entered_collectives(), sys._current_frames()[thread]
        if sum(entered.values()) >= sum(before.values()) + 1 and "torch/autograd/" in frame.f_code.co_filename:
            _leave(file, entered, frame.f_code.co_name)
            return


def _leave(file: Path, entered: Counts, waits_in: str) -> None:
    unfinished = file.with_suffix(".unfinished")
    unfinished.write_text(json.dumps({"entered": entered, "waits_in": waits_in}), encoding="utf-8")
    unfinished.replace(file)


class AfterCopy(Unscored):
    """In the step after `step`, every rank waits until the copy of that step's state in memory is complete.

    `memory`: the folder in which a job makes its folder of copies.
    """

    def __init__(self, *, memory: str, step: int, **points: Any) -> None:
        super().__init__(**points)
        self.memory, self.step, self.calls = Path(memory), step, 0

    def loss(self, output: Tensor, batch: samestep.Batch) -> tuple[Tensor, Tensor | int]:
        if dist.is_initialized() and dist.get_world_size() > 1:  # not where the task's contract is checked
            self.calls += 1
        if self.calls == self.step + 1:
            until = time.monotonic() + _LONGEST_COPY
            while not list(self.memory.glob(f"samestep-memory-*/step-{self.step}")):
                if time.monotonic() > until:
                    raise TimeoutError(f"no copy of step {self.step} in {self.memory}")
                time.sleep(0.005)
        return super().loss(output, batch)


class Paced(Points):
    """Takes its time in every loss, until a file is there."""

    def __init__(self, *, seconds: float, until: str, **points: Any) -> None:
        super().__init__(**points)
        self.seconds, self.until = seconds, Path(until)

    def loss(self, output: Tensor, batch: samestep.Batch) -> tuple[Tensor, Tensor | int]:
        if not self.until.exists():
            time.sleep(self.seconds)
        return super().loss(output, batch)
