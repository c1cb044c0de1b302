"""Ranks on the pretended accelerator: what they compute, held against one process, and where they wait."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from traceback import format_exc
from typing import Any

import samestep
from samestep.job import Job
from samestep.launch import local
from samestep.launch.world import World, join
from samestep.layout import Layout
from samestep.tasks.base import Task
from samestep.tasks.registry import resolve
from samestep.training.fit import Training
from samestep.verification.proof import Proof, Reference, hold_against, proof_job, reference

STEPS = 3
WARM = 2  # steps that make states and buffers, and check what is checked once


@dataclass(frozen=True, kw_only=True)
class OnDevice:
    """What a job under a layout did on the device."""

    proof: Proof | None = None
    refused: str | None = None  # why the layout doesn't fit the model
    failed: str | None = None  # the traceback of what went wrong
    waits: Sequence[str] = ()  # of a step when all is warm, on any rank

    def problem(self, allowed: Mapping[str, str]) -> str | None:
        """What is wrong with it, where something is; `allowed`: places that may wait, with the reason."""
        if self.proof is None:
            return self.failed
        if not self.proof.same_step:
            return f"another step: {self.proof.max_relative_difference} at {self.proof.worst_parameter}"
        others = sorted({each for each in self.waits if each.rpartition(" (")[0] not in allowed})
        return f"waits for the device: {', '.join(others)}" if others else None


def on_device(jobs: Mapping[str, Job]) -> dict[str, OnDevice]:
    """By name of a job with its layout, what it did. There is one start of ranks for each size of layouts."""
    found: dict[str, OnDevice] = {}
    with TemporaryDirectory(prefix="samestep-references-") as folder:
        known: dict[str, Reference] = {}
        by_recipe: dict[int, Reference] = {}
        for number, (name, job) in enumerate(jobs.items()):
            recipe = id(job.recipe)
            if recipe not in by_recipe:
                place = Path(folder) / str(number)
                place.mkdir()
                alone = proof_job(replace(job, run=replace(job.run, device="cpu")), dropout=True)
                by_recipe[recipe] = reference(alone, resolve(job.recipe), STEPS, place)
            known[name] = by_recipe[recipe]
        sizes: dict[int, dict[str, Job]] = {}
        for name, job in jobs.items():
            sizes.setdefault(Layout.parse(job.run.layout).size, {})[name] = job
        for size, mine in sizes.items():
            found |= local.start(_on_each_rank, (mine, {name: known[name] for name in mine}), size)
    return found


def _on_each_rank(jobs: Mapping[str, Job], known: Mapping[str, Reference]) -> dict[str, OnDevice]:
    import os

    import pretended_device
    import torch.distributed as dist

    os.environ["CUDA_VISIBLE_DEVICES"] = "0"  # each rank sees its own device alone
    pretended_device.install()
    found: dict[str, OnDevice] = {}
    tasks: dict[int, Task] = {}  # by their recipe: some read texts for longer than a proof takes
    with join(threads=1) as world:
        group: Any = dist.group.WORLD
        assert group.bound_device_id == world.device
        group.bound_device_id = None  # gloo can't split a group as NCCL does where one is bound to its device
        for name, job in jobs.items():
            try:
                if id(job.recipe) not in tasks:
                    tasks[id(job.recipe)] = resolve(job.recipe)
                task = tasks[id(job.recipe)]
                found[name] = _one(job, task, world, known[name] if world.rank == 0 else None)
            except samestep.UserError as error:  # on every rank alike; what broke in a forward is its cause
                broke = error.__cause__ is not None
                found[name] = OnDevice(failed=format_exc()) if broke else OnDevice(refused=str(error))
    return found


def _one(job: Job, task: Task, world: World, known: Reference | None) -> OnDevice:
    import torch.distributed as dist
    from pretended_device import NAME, WAITS

    assert world.device.type == NAME
    layout = Layout.parse(job.run.layout)
    proof = hold_against(proof_job(job, dropout=True), task, world, layout, STEPS, known)
    training = Training(job, task, world, layout)
    steps = training.steps(stop=WARM + 2)
    for _ in range(WARM):
        next(steps)
    with WAITS.noted() as places:
        for _ in steps:
            pass
    everyone: list[Any] = [None] * world.world_size
    dist.all_gather_object(everyone, places)
    return OnDevice(proof=proof, waits=sorted({each for some in everyone for each in some}))
