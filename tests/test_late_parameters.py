"""ZeRO-1: what a step has changed comes while the next forward runs; code that reads it elsewhere waits for it."""

from collections.abc import Mapping
from typing import Any

import pytest
from proving import Case, prove, same
from tiny_models import Tiny
from torch import Tensor, nn

import samestep
from samestep.job import Job, Run
from samestep.launch import local
from samestep.verification.proof import proof_job

pytestmark = pytest.mark.timeout(240)

# Megabytes of a message: the tiny model goes in about as many lots as it has layers.
SMALL = 0.005


def _recipe(task: samestep.Task, **values: Any) -> samestep.Recipe:
    return samestep.Recipe(task=task, batch=10, steps=4, optimizer=samestep.AdamW(lr=1e-2), clip=0.5, **values)


class Peeking(nn.Module):
    """Four layers; the model itself also reads a number of the last one before it runs any."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 20)) for _ in range(4))
        self.out = nn.Linear(20, 1)

    def forward(self, points: Tensor) -> Tensor:
        last: Any = self.layers[3]
        points = points * last[0].bias.mean()
        for layer in self.layers:
            points = points + layer(points)
        return self.out(points)


class Peeks(Tiny):
    """Its model reads a layer's parameter outside of the layer."""

    def __init__(self) -> None:
        super().__init__(name="mlp")

    def model(self) -> nn.Module:
        return Peeking()


RUN: Mapping[str, Any] = {"bucket_mb": SMALL}


@pytest.mark.slow
def test_the_step_is_that_of_one_process() -> None:
    """Also with micro-batches, and a parameter that is read outside of its layer."""
    cases: dict[str, Case] = {
        "micro-batches": (_recipe(Tiny(name="llama")), "zero1x2", {**RUN, "micro_batch": 2}),
        "read elsewhere": (_recipe(Peeks()), "zero1x2", RUN),
    }
    assert same(prove(cases, steps=4), list(cases)) == {}


@pytest.mark.slow
def test_the_step_is_that_of_one_process_under_other_layouts() -> None:
    """With recomputation, replicas, slices, split tokens, and an average of the weights, taken after a step."""
    llama = _recipe(Tiny(name="llama"))
    averaged = _recipe(Tiny(name="llama-tied"), average=samestep.Average(decay=0.5))
    cases: dict[str, Case] = {
        "two": (llama, "zero1x2", RUN),
        "average": (averaged, "zero1x2", RUN),
        "recomputed": (llama, "zero1x2 recompute=full", RUN),
        "replicas": (llama, "dp2 zero1x2", RUN),
        "slices": (llama, "zero1x2 tp2", RUN),
        "tokens": (llama, "zero1x2 cp2", RUN),
    }
    assert same(prove(cases, steps=4), list(cases)) == {}


def test_layers_wait_for_their_own_parameters_when_they_run() -> None:
    jobs = {"llama": Job(recipe=_recipe(Tiny(name="llama")), run=Run(layout="zero1x2", threads=1, bucket_mb=SMALL))}
    order, left = local.start(_order_of_a_step, (proof_job(jobs["llama"]),), 2)
    waits = [place for place, what in enumerate(order) if what == "wait"]
    runs = {what: place for place, what in enumerate(order) if what != "wait"}
    assert list(runs) == [f"model.layers.{number}" for number in range(4)]
    # Some messages before the first layer, and some before each later one, when those before it have run.
    began = [0, *runs.values()]
    for before, after in zip(began, [*runs.values()], strict=False):
        assert any(before <= place < after for place in waits), order
    assert left == [True, False]  # messages on their way after a step, and after its parameters were read


def _order_of_a_step(job: Job) -> tuple[list[str], list[bool]]:
    """What a step waits for and runs, in order; whether messages are left before and after a look at parameters."""
    from samestep.launch.world import join
    from samestep.layout import Layout
    from samestep.parallel.optimizer.late import LateParameters, Message
    from samestep.tasks.registry import resolve
    from samestep.training.fit import Training

    order: list[str] = []
    found: list[LateParameters] = []
    made, put = LateParameters.__init__, Message.put

    def noted(self: LateParameters, *arguments: Any, **keywords: Any) -> None:
        made(self, *arguments, **keywords)
        found.append(self)

    def waited(self: Message) -> None:
        order.append("wait")
        put(self)

    with join(device="cpu", threads=1) as world, pytest.MonkeyPatch.context() as patch:
        patch.setattr(LateParameters, "__init__", noted)
        patch.setattr(Message, "put", waited)
        training = Training(job, resolve(job.recipe), world, Layout.parse(job.run.layout))
        trainer: Any = training.session.trainer
        for name, module in trainer.model.named_modules():
            if name.startswith("model.layers.") and name.count(".") == 2:
                module.register_forward_hook(lambda *_, name=name: order.append(name))
        steps = training.steps()
        next(steps)
        order.clear()
        next(steps)
        (late,) = found
        in_step = list(order)
        left = [bool(late._on_their_way)]
        list(trainer.parameters())
        return in_step, [*left, bool(late._on_their_way)]
