"""A task that holds much memory for a moment: in the process that starts the ranks, and in rank 1."""

import torch.distributed as dist
from imported_before import TORCHMETRICS
from scored_task import Scored
from torch import Tensor

import samestep

STARTER = 1 << 30  # bytes; more than a rank needs
RANK_1 = 300 << 20


class Heavy(Scored):
    def check(self) -> None:
        """Called before any rank starts."""
        hold(STARTER)

    def loss(self, output: Tensor, batch: samestep.Batch) -> tuple[Tensor, Tensor | int]:
        assert TORCHMETRICS, "ranks import what takes seconds each for itself"
        if dist.get_rank() == 1:
            hold(RANK_1)
        return super().loss(output, batch)


def hold(size: int) -> None:
    """Touch so many bytes, and let them go."""
    memory = bytearray(b"x") * size
    assert memory[-1] == memory[0]
