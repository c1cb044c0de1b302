"""Ends of process groups: none waits for ever, also where a model holds its group longer than the job does."""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from samestep import environment
from samestep.launch import local, world
from samestep.launch.world import leave_process_group

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


def test_gloo_is_found_beside_another_back_end(tmp_path: Path) -> None:
    """As on accelerators, whose groups have NCCL as well; of it no message is asked for at the end."""
    dist.init_process_group("cpu:gloo,cuda:fake", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        assert isinstance(world._gloo_of(dist.group.WORLD), dist.ProcessGroupGloo)
    finally:
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        assert world._gloo_of(dist.group.WORLD) is None
    finally:
        dist.destroy_process_group()


def test_a_process_that_has_trained_prints_its_own_errors_as_before() -> None:
    """PyTorch's hook begins each line with "[rank0]: ", once more for each group that the process has joined."""
    before = sys.excepthook
    with world.join(alone=True, device="cpu", threads=1):
        assert sys.excepthook is before
    with pytest.raises(ZeroDivisionError), world.join(alone=True, device="cpu", threads=1):
        raise ZeroDivisionError
    assert sys.excepthook is before
    assert local.start(leave, (), 2)


def leave() -> bool:
    """On a rank of two: the hook is PyTorch's while the rank has its group, and no longer."""
    before = sys.excepthook
    with world.join(device="cpu", threads=1):
        within = sys.excepthook
    return within is not before and sys.excepthook is before
