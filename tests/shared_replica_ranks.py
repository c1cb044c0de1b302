"""What ranks do in the tests of shared replicas."""

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import samestep
from samestep.comm.shared_memory.backend import for_transport
from samestep.engines.native.shared_replicas import SharedReplicasTrainer
from samestep.job import Job, Run
from samestep.launch.world import join
from samestep.layout import Layout
from samestep.parallel.optimizer import shared
from samestep.tasks.registry import resolve
from samestep.training.fit import Training
from samestep.training.usage import Usage


def trained(recipe: samestep.Recipe, world: Any, *, layout: str, steps: int, **run: Any) -> Training:
    job = Job(recipe=recipe, run=Run(layout=layout, threads=1, **run))
    training = Training(job, resolve(recipe), world, Layout.parse(layout))
    for _ in training.steps(stop=steps, measured=steps - 1):
        pass
    return training


def both_ways(
    recipes: Mapping[str, samestep.Recipe], layout: str, steps: int
) -> list[dict[str, tuple[list[str], Usage, Usage]]]:
    """Of each rank: the state's names that differ from plain replicas', and what either way holds."""
    found: dict[str, Any] = {}
    with join(device="cpu", threads=1, cpu_backend=for_transport("auto")) as world:
        for name, recipe in recipes.items():
            shared = trained(recipe, world, layout=layout, steps=steps, share_replicas=True)
            assert isinstance(shared.session.trainer, SharedReplicasTrainer)
            plain = trained(recipe, world, layout=layout, steps=steps, sparse_rows="off")
            mine, theirs = shared.session.trainer.state(), plain.session.trainer.state()
            apart = [key for key, value in theirs.items() if not torch.equal(mine[key], value)]
            found[name] = (apart, shared.usage, plain.usage)
        everyone: list[Any] = [None] * world.world_size
        dist.all_gather_object(everyone, found)
    return everyone


def one_copy(recipe: samestep.Recipe) -> list[str]:
    """What is not as it should be of the memory of two ranks: what one writes into a parameter the other reads."""
    found: list[str] = []
    with join(device="cpu", threads=1, cpu_backend=for_transport("auto")) as world:
        training = trained(recipe, world, layout="dp2", steps=1, share_replicas=True)
        trainer = training.session.trainer
        assert isinstance(trainer, SharedReplicasTrainer)
        for name, parameter in trainer.model.named_parameters():
            if world.rank == 0:
                parameter.detach().fill_(7.0)
            dist.barrier()
            if not parameter.eq(7.0).all():
                found.append(name)
            dist.barrier()
        mine = [tuple(piece.shape) for _, piece in trainer.model.named_parameters()]
        assert mine == [tuple(p.shape) for p in resolve(recipe).model().parameters()]
        everyone: list[Any] = [None] * world.world_size
        dist.all_gather_object(everyone, found)
    return [name for each in everyone for name in each]


def told_on_two_hosts(recipe: samestep.Recipe) -> str:
    """What a rank is told whose peer says that it is on another host."""
    with join(device="cpu", threads=1, cpu_backend=for_transport("gloo")) as world:
        shared.host_identity = lambda: f"host {world.rank}"
        try:
            trained(recipe, world, layout="dp2", steps=1, share_replicas=True)
        except samestep.LayoutError as error:
            return str(error)
    return "nothing"


def told_without_memory(recipe: samestep.Recipe) -> str:
    """What a rank is told where a region can't be made."""

    def full(size: int) -> tuple[int, str]:
        raise shared.NoRegionError(f"{size} bytes of shared memory are needed: No space left on device")

    with join(device="cpu", threads=1, cpu_backend=for_transport("gloo")) as world:
        share = shared.region.share
        shared.region.share = lambda *given: share(*given, make=full)  # pyright: ignore[reportAttributeAccessIssue]
        try:
            trained(recipe, world, layout="dp2", steps=1, share_replicas=True)
        except samestep.UserError as error:
            return str(error)
    return "nothing"


def steps_until_killed(recipe: samestep.Recipe, folder: str, victim: int) -> None:
    """Take steps until rank `victim` kills itself; the other writes down what it is told."""
    with join(device="cpu", threads=1, cpu_backend=for_transport("auto")) as world:
        if world.rank != victim:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the agent's, which may come before the group's error
        job = Job(recipe=recipe, run=Run(layout="dp2", threads=1, share_replicas=True))
        training = Training(job, resolve(recipe), world, Layout.parse("dp2"))
        try:
            for batch, _ in training.steps():
                if batch.step == 2:
                    maps = Path("/proc/self/maps").read_text(encoding="ascii")
                    Path(folder, f"maps-{world.rank}").write_text(maps, encoding="ascii")
                    if world.rank == victim:
                        os.kill(os.getpid(), signal.SIGKILL)
        except RuntimeError as error:
            Path(folder, f"told-{world.rank}").write_text(str(error), encoding="utf-8")
            raise
