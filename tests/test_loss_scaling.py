"""fp16 under every layout: every rank has the same scale, and passes over a step where any gradient overflows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from samestep import jobfile
from samestep.job import Job
from samestep.launch import local
from samestep.layout import Layout

pytestmark = pytest.mark.timeout(400)

JOB = Path(__file__).parents[1] / "examples" / "proof" / "language.yaml"
FAST = ("pp2",)
OTHERS = (
    *("fsdp2", "dp2", "zero1x2", "zero2x2", "tp2", "cp2", "pp2 stages=2 schedule=zbv-zero-bubble"),
    *("fsdp2 tp2", "pp2 tp2", "pp2 fsdp2", "pp2 cp2", "dp2 offload=optimizer", "fsdp2 offload=parameters"),
)
LARGE = 2.0**20  # a scale with which gradients overflow, and fewer on one rank than on another as it comes down
STEPS = 7  # in which it comes down to where steps can be taken


@dataclass(frozen=True, kw_only=True)
class Scaled:
    """What a rank saw of a training."""

    losses: Sequence[float]  # of steps with the first scale
    scales: Sequence[float]  # after each step that began with too large a scale
    moved: bool  # whether one of these changed a parameter


def _job(layout: str) -> Job:
    job = jobfile.load(JOB, []).job
    recipe = replace(job.recipe, precision="fp16", dropout=False, steps=3 + STEPS)
    return replace(job, recipe=recipe, run=replace(job.run, layout=layout, threads=1))


def _scaled(layouts: Sequence[str], *, planted: bool = False, alone: bool = False) -> dict[str, list[Scaled]]:
    """By layout what each rank saw.

    `planted`: the last rank has infinite gradients in the last step. `alone`: no rank hears of another's overflow.
    """
    by_size: dict[int, list[str]] = {}
    for layout in layouts:
        by_size.setdefault(Layout.parse(layout).size, []).append(layout)
    found: dict[str, list[Scaled]] = {}
    for size, mine in by_size.items():
        found |= local.start(_on_each_rank, (mine, planted, alone), size)
    return found


def _on_each_rank(layouts: Sequence[str], planted: bool, alone: bool) -> Mapping[str, list[Scaled]]:
    import os

    import pretended_device
    import torch.distributed as dist

    from samestep.engines.precision import Precision
    from samestep.launch.world import World, join
    from samestep.tasks.registry import resolve
    from samestep.training.fit import Training

    os.environ["CUDA_VISIBLE_DEVICES"] = "0"  # each rank sees its own device alone
    pretended_device.install()
    agreed, infinite = Precision.unscale, [False]

    def unscale(self: Precision, optimizer: Any, everyone: Any = None) -> None:
        if infinite[0]:
            for parameter in (each for group in optimizer.param_groups for each in group["params"]):
                if parameter.grad is not None:
                    parameter.grad.fill_(float("inf"))
        agreed(self, optimizer, None if alone else everyone)

    Precision.unscale = unscale

    def one(layout: str, world: World) -> Scaled:
        job = _job(layout)
        training = Training(job, resolve(job.recipe), world, Layout.parse(layout))
        trainer: Any = training.session.trainer
        steps = training.steps()
        losses = [float(next(steps)[1].loss) for _ in range(3)]
        trainer._precision.restore({**trainer._precision.state(), "scale": LARGE})
        before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
        scales: list[float] = []
        for _ in steps:
            scales.append(trainer._precision.state()["scale"])
            infinite[0] = planted and len(scales) == STEPS - 1 and world.rank == world.world_size - 1
        infinite[0] = False
        pairs = zip(before, trainer.model.parameters(), strict=True)
        return Scaled(losses=losses, scales=scales, moved=any(bool((a != b).any()) for a, b in pairs))

    found: dict[str, list[Scaled]] = {}
    with join(threads=1) as world:
        group: Any = dist.group.WORLD
        group.bound_device_id = None  # gloo can't split a group as NCCL does where one is bound to its device
        for layout in layouts:
            everyone: list[Scaled] = [one(layout, world)]
            if world.world_size > 1:
                gathered: list[object] = [None] * world.world_size
                dist.all_gather_object(gathered, everyone[0])
                everyone = gathered  # pyright: ignore[reportAssignmentType]
            found[layout] = everyone
    return found


def _assert_right(layouts: Sequence[str]) -> None:
    found = _scaled(["single", *layouts])
    (alone,) = found.pop("single")
    assert min(alone.scales) < LARGE
    assert alone.moved
    for layout, ranks in found.items():
        for rank in ranks:
            assert rank.losses == pytest.approx(alone.losses, rel=2e-3), layout
            assert rank.scales == ranks[0].scales, layout  # all heard of the same overflows
            assert rank.scales[0] < LARGE, layout
            assert rank.moved, layout


@pytest.mark.slow
def test_ranks_with_other_parameters_hear_of_each_others_overflows() -> None:
    _assert_right(FAST)


@pytest.mark.slow
def test_every_layout_scales_the_loss() -> None:
    _assert_right(OTHERS)


@pytest.mark.slow
@pytest.mark.parametrize("alone", [False, True])
def test_ranks_that_hear_of_no_others_overflow_are_seen(alone: bool) -> None:
    ((first, last),) = _scaled(["pp2"], planted=True, alone=alone).values()
    assert last.scales[-1] < last.scales[-2]
    assert (first.scales == last.scales) is not alone
