"""The time of a few steps of a job on each of its ranks, and what they held."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from samestep.job import Job
from samestep.launch.world import World
from samestep.layout import Layout
from samestep.tasks.base import Task
from samestep.training.fit import Training
from samestep.training.usage import Usage

_FIRST = 3  # steps that are not timed: state and buffers are made in two of them, and bytes are counted in the third


@dataclass(frozen=True, kw_only=True)
class StepTiming:
    """One rank's steps."""

    seconds: float  # the median step
    usage: Usage


def time_steps(job: Job, task: Task, world: World, layout: Layout, steps: int) -> Sequence[StepTiming]:
    """Take some steps beside the first ones and time each; every rank returns all ranks' timings."""
    last = _FIRST + max(steps, 1)
    recipe = replace(job.recipe, steps=last, epochs=None)
    training = Training(replace(job, recipe=recipe), task, world, layout)
    seconds: list[float] = []
    began = time.perf_counter()
    for _, report in training.steps(measured=_FIRST - 1):
        report.loss.item()
        if world.device.type != "cpu":
            torch.accelerator.synchronize(world.device)
        now = time.perf_counter()
        seconds.append(now - began)
        began = now
    assert training.usage is not None  # there are more steps than those before it
    mine = StepTiming(seconds=median(seconds[_FIRST:]), usage=training.usage)
    if world.world_size == 1 and not dist.is_initialized():
        return (mine,)
    ranks: list[Any] = [None] * world.world_size
    dist.all_gather_object(ranks, mine)
    return tuple(ranks)
