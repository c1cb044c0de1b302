"""Layouts that take their turns in one start of ranks share process groups."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
import torch.distributed as dist

import samestep
from samestep.comm.group_pool import GroupPool
from samestep.job import Job, Run
from samestep.launch import local
from samestep.launch.world import join
from samestep.layout import Layout
from samestep.tasks.registry import resolve
from samestep.torch_internals.groups import all_groups
from samestep.verification.proof import Reference, hold_against, proof_job, reference

LAYOUTS = ("dp2", "fsdp2", "zero1x2")
JOB = proof_job(Job(recipe=samestep.Recipe(task="regression", batch=8, steps=2), run=Run(threads=1)), dropout=False)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_layouts_after_the_first_ones_need_no_more_groups_and_threads() -> None:
    with TemporaryDirectory(prefix="samestep-reference-") as folder:
        known = reference(JOB, resolve(JOB.recipe), 2, Path(folder))
        counts, same = local.start(prove_each_three_times, (known,), 2)
    assert all(same)
    first, second, third = counts
    assert second == third
    assert third[0] - first[0] <= 2  # a layout may make one that the one before it hadn't


def prove_each_three_times(known: Reference) -> tuple[list[tuple[int, int]], list[bool]]:
    """On a rank: the numbers of groups and threads after each round, and whether every proof passed."""
    groups, counts, same = GroupPool(), list[tuple[int, int]](), list[bool]()
    with join(device="cpu", threads=1) as world:
        for _ in range(3):
            for layout in LAYOUTS:
                mine = known if world.rank == 0 else None
                with groups.lent():
                    proof = hold_against(JOB, resolve(JOB.recipe), world, Layout.parse(layout), 2, mine)
                same.append(proof.same_step)
            counts.append((len(all_groups()), len(list(Path("/proc/self/task").iterdir()))))
    return counts, same


@pytest.mark.timeout(60)
def test_groups_of_one_block_differ_and_those_of_the_next_are_the_same() -> None:
    assert local.start(make_and_send, (), 2) == [True, True, True, 6.0]


def make_and_send() -> list[bool | float]:
    groups = GroupPool()
    with join(device="cpu", threads=1) as world:
        make = dist.new_group
        with groups.lent():
            one, other = dist.new_group([0, 1]), dist.new_group([0, 1])
        with groups.lent():
            again = dist.new_group([0, 1])
            dist.new_group([0, 1], backend="gloo")
        total = torch.tensor(world.rank + 1.0)
        dist.all_reduce(total, group=again)
        dist.all_reduce(total, group=other)
        return [one is not other, again is one, dist.new_group is make, total.item()]
