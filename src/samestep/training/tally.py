"""Which rank took how many samples: a line a rank, whose product is visibly the data set."""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from samestep.data.loader import StepBatch


class Tally:
    """Counts a rank's samples of the first epoch."""

    def __init__(self, data_set: int) -> None:
        self._data_set = data_set
        self._samples: list[int] = []

    def add(self, batch: StepBatch) -> None:
        if batch.epoch == 0:
            self._samples.append(batch.local_samples)

    def gather(self) -> list[str]:
        """A line a rank and one for all, from every rank's counts; the same lines on every rank."""
        counts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(counts, self._samples)
        lines = [f"rank {rank}: {self._line(mine, len(counts))}" for rank, mine in enumerate(counts)]
        total = sum(sum(mine) for mine in counts)
        return [*lines, f"all ranks: {total:,} of {self._data_set:,} samples in the first epoch"]

    def _line(self, samples: Sequence[int], ranks: int) -> str:
        steps, sizes = len(samples), sorted(set(samples), reverse=True)
        if len(sizes) == 1:
            together = "1 rank" if ranks == 1 else f"{ranks} ranks"
            return f"{steps} steps x {sizes[0]} samples x {together} = {steps * sizes[0] * ranks:,}"
        return f"{steps} steps of {' or '.join(map(str, sizes))} samples = {sum(samples):,}"
