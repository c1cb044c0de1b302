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

    def gather(self, group: dist.ProcessGroup) -> list[str]:
        """A line for each rank of a group that shares the samples out, and one for all of them."""
        ranks = dist.get_process_group_ranks(group)
        counts: list[Any] = [None] * len(ranks)
        dist.all_gather_object(counts, self._samples, group=group)
        like = len({size for mine in counts for size in mine}) == 1
        lines = [
            f"rank {rank}: {_product(mine, len(counts)) if like else _sum(mine)}"
            for rank, mine in zip(ranks, counts, strict=True)
        ]
        total = sum(sum(mine) for mine in counts)
        return [*lines, f"all ranks: {total:,} of {self._data_set:,} samples in the first epoch"]


def _product(samples: Sequence[int], ranks: int) -> str:
    """Where every rank takes the same number of samples in every step."""
    together = "1 rank" if ranks == 1 else f"{ranks} ranks"
    return f"{len(samples)} steps x {samples[0]} samples x {together} = {len(samples) * samples[0] * ranks:,}"


def _sum(samples: Sequence[int]) -> str:
    sizes = sorted(set(samples), reverse=True)
    return f"{len(samples)} steps of {' or '.join(map(str, sizes))} samples = {sum(samples):,}"
