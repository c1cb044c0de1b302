"""Replicas of a pipeline: gradients go while the last backwards run, and the step is that of one process."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from proving import Case, prove, same
from tiny_models import Tiny
from torch import Tensor, nn

import samestep
from samestep.job import Job, Run
from samestep.launch import local
from samestep.verification.proof import proof_job

pytestmark = pytest.mark.timeout(240)

SMALL = 0.002  # megabytes of a message: each layer of the tiny models has several
RUN: Mapping[str, Any] = {"bucket_mb": SMALL, "micro_batch": 2}


def _recipe(task: samestep.Task) -> samestep.Recipe:
    return samestep.Recipe(task=task, batch=12, steps=4, optimizer=samestep.AdamW(lr=1e-2), clip=0.5)


class Idle(nn.Module):
    """Layers of which the second has a part that no sample uses."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 20)) for _ in range(4))
        self.layers[1].register_parameter("idle", nn.Parameter(torch.ones(20)))
        self.out = nn.Linear(20, 1)

    def forward(self, points: Tensor) -> Tensor:
        for layer in self.layers:
            points = points + layer(points)
        return self.out(points)


class PartlyIdle(Tiny):
    """Weight decay must pass by what is idle, as it does in one process."""

    def __init__(self) -> None:
        super().__init__(name="mlp")

    def model(self) -> nn.Module:
        return Idle()


def test_the_step_is_that_of_one_process() -> None:
    """With owners of gradients and idle weights; slow tests have weights that stages share."""
    cases: dict[str, Case] = {"idle, owners": (_recipe(PartlyIdle()), "pp2 zero1x2", RUN)}
    assert same(prove(cases, steps=3), list(cases)) == {}


@pytest.mark.slow
def test_the_step_is_that_of_one_process_under_schedules_of_each_kind() -> None:
    llama, tied = _recipe(Tiny(name="llama")), _recipe(Tiny(name="llama-tied"))
    cases: dict[str, Case] = {
        "one after the other": (llama, "dp2 pp2 schedule=gpipe", RUN),
        "in turns": (llama, "dp2 pp2", RUN),
        "recomputed": (llama, "dp2 pp2 recompute=full", RUN),
        "several stages": (tied, "dp2 pp2 stages=2 schedule=interleaved-1f1b", RUN),
        "weights apart": (tied, "dp2 pp2 stages=2 schedule=interleaved-zero-bubble", RUN),
        "owners": (tied, "pp2 zero1x2", RUN),
        "idle": (_recipe(PartlyIdle()), "dp2 pp2", RUN),
        "idle, owners": (_recipe(PartlyIdle()), "pp2 zero1x2", RUN),
    }
    assert same(prove(cases, steps=4), list(cases)) == {}


@pytest.mark.slow
def test_messages_go_while_the_last_backward_runs() -> None:
    run = Run(layout="dp2 pp2", threads=1, **RUN)
    events = local.start(_events_of_a_step, (proof_job(Job(recipe=_recipe(Tiny(name="llama")), run=run)),), 4)
    last = max(place for place, what in enumerate(events) if what == "backward")
    sent = [place for place, what in enumerate(events) if what == "send"]
    # From the layer behind the first one of the stage; what the first one holds goes when it is done.
    assert any(place < last for place in sent), events
    assert any(place > last for place in sent), events
    # No earlier backward sends anything: the gradients were not final.
    assert min(sent) > [place for place, what in enumerate(events) if what == "backward"][-3], events


def _events_of_a_step(job: Job) -> list[str]:
    """When this rank's layers had their backwards, and messages of gradients went, in a step when all is known."""
    from samestep.launch.world import join
    from samestep.layout import Layout
    from samestep.parallel.sharding import GradientMessage
    from samestep.tasks.registry import resolve
    from samestep.training.fit import Training

    events: list[str] = []
    send = GradientMessage.send.__func__  # pyright: ignore[reportFunctionMemberAccess]

    def noted(cls: type[GradientMessage], *arguments: Any) -> GradientMessage:
        events.append("send")
        return send(cls, *arguments)

    with join(device="cpu", threads=1) as world, pytest.MonkeyPatch.context() as patch:
        patch.setattr(GradientMessage, "send", classmethod(noted))
        training = Training(job, resolve(job.recipe), world, Layout.parse(job.run.layout))
        trainer: Any = training.session.trainer
        for name, module in trainer.model.named_modules():
            if name.startswith("model.layers.") and name.count(".") == 2 and any(True for _ in module.parameters()):
                module.register_full_backward_hook(lambda *_: events.append("backward"))
        steps = training.steps()
        next(steps)
        events.clear()
        next(steps)
        return events
