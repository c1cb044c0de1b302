"""Trainings for the tests of profiles: several in one start of ranks, and tasks that are slow on one rank."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from small_tasks import Points
from torch import Tensor, nn

import samestep
from samestep.comm.shared_memory.backend import for_transport
from samestep.job import Job, Profiling, Run
from samestep.launch import local
from samestep.launch.world import join
from samestep.layout import Layout
from samestep.profiling.breakdown import Profile
from samestep.profiling.profiler import StepProfiler
from samestep.ranks import Transport
from samestep.training.fit import Training

STEPS = 5
SLOW = 0.15  # seconds: more than a busy machine keeps a rank from its processor

# Task, layout, name of the folder, and other keys of `run:`.
Case = tuple[samestep.Task, str, str, Mapping[str, Any]]


class _Slow(nn.Module):
    """Does nothing for a while on rank 1: asleep, or at work."""

    def __init__(self, *, busy: bool) -> None:
        super().__init__()
        self._busy = busy

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() and dist.is_initialized() and dist.get_rank() == dist.get_world_size() - 1:
            if self._busy:
                until = time.thread_time() + SLOW
                while time.thread_time() < until:
                    pass
            else:
                time.sleep(SLOW)
        return x


class Net(Points):
    """Layers that every layout can split."""

    def model(self) -> nn.Module:
        first, last = (nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 16)), (nn.Linear(16, 16), nn.GELU())
        return nn.Sequential(*first, nn.LayerNorm(16), *last, nn.Linear(16, self.classes))


class SlowForward(Net):
    """Its forward takes longer on the last rank."""

    def __init__(self, *, busy: bool = False) -> None:
        super().__init__()
        self._busy = busy

    def model(self) -> nn.Module:
        net = super().model()
        assert isinstance(net, nn.Sequential)
        return nn.Sequential(_Slow(busy=self._busy), *net)


class SlowData(Net):
    """Its samples take longer to be put together on the last rank."""

    def collate(self, samples: Sequence[Any]) -> samestep.Batch:
        if dist.is_initialized() and dist.get_rank() == dist.get_world_size() - 1:
            time.sleep(SLOW)
        return super().collate(samples)


def profiles(cases: Sequence[Case], folder: Path, *, ranks: int, transport: Transport = "auto") -> list[Profile]:
    """The profile of each case, taken one after the other by the same ranks."""
    return local.start(_on_rank, (cases, folder, transport), ranks)


def _on_rank(cases: Sequence[Case], folder: Path, transport: Transport) -> list[Profile | None]:
    with join(device="cpu", threads=1, cpu_backend=for_transport(transport)) as world:
        found = []
        for task, layout, name, run in cases:
            recipe = samestep.Recipe(task=task, batch=16, steps=4 + STEPS)
            job = Job(recipe=recipe, run=Run(device="cpu", layout=layout, micro_batch=8, **run))
            training = Training(job, task, world, Layout.parse(layout))
            profiler = StepProfiler(
                Profiling(steps=STEPS), first_step=0, total_steps=training.total_steps, device=world.device
            )
            training.profiler = profiler
            training.session.trainer.clock = profiler.clock
            with profiler:
                for _ in training.steps():
                    pass
            found.append(profiler.gather(folder / name, rank=world.rank, layout=layout))
    return found
