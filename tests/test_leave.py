"""Ends of process groups: none waits for ever, also where a model holds its group longer than the job does."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from samestep import environment
from samestep.comm.leave import leave_process_group
from samestep.launch import local

ENDS = 40  # without care, one of some thirty waits


def test_a_model_that_outlives_the_job_does_not_hang_its_end(tmp_path: Path) -> None:
    assert local.start(meet_and_leave, (tmp_path,), 2) == ENDS


def meet_and_leave(folder: Path) -> int:
    ranks = environment.ranks()
    assert ranks is not None
    for number in range(ENDS):
        meet_at = f"file://{folder}/store-{number}"
        dist.init_process_group("gloo", init_method=meet_at, rank=ranks.rank, world_size=ranks.world_size)
        model = DistributedDataParallel(nn.Linear(4, 4))
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
        leave_process_group()
        del model  # and with it the group
    return ENDS
