"""Messages that the documentation shows and that Python calls raise or make, without starting a process."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import drawing_nets
import odd_nets
import odd_tasks as odd
import penalty_tasks
import torch
from small_tasks import Points
from torch import Tensor, nn

import samestep
from samestep.communication import Bf16
from samestep.engines.checks import check_communication
from samestep.engines.registry import resolve
from samestep.fault_tolerance.fault import Fault
from samestep.launch import consistency
from samestep.launch.endings import ended_by
from samestep.parallel.complex_parameters import check_complex


class Built(Points):
    """Points, with another part."""

    def __init__(self, model: Callable[[], nn.Module] | None = None, **parts: Any) -> None:
        super().__init__()
        self.built = model
        for name, part in parts.items():
            setattr(self, name, part)

    def model(self) -> nn.Module:
        return super().model() if self.built is None else self.built()


class OneDraw(odd_nets.Net):
    """One random number, which is neither a sample's nor without a dimension."""

    def between(self, hidden: Tensor) -> Tensor:
        return hidden * torch.rand(1)


class Used(odd_nets.Net):
    """Follows how much of its hidden values is above 0."""

    usage: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("usage", torch.zeros(16))

    def between(self, hidden: Tensor) -> Tensor:
        left = hidden - self.usage
        if self.training:
            with torch.no_grad():
                self.usage.lerp_((hidden > 0).to(hidden.dtype).mean(0), 0.1)
        return left


class Filtered(odd_nets.Net):
    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.ones(16, dtype=torch.complex64))

    def between(self, hidden: Tensor) -> Tensor:
        return hidden * self.filter.abs()


class Looked(odd_nets.Net):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 16, sparse=True)


def dropped() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 16), nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.1)), nn.Linear(16, 3))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Linear(16, 3))


def train(task: samestep.Task, layout: str = "dp2", **run: Any) -> None:
    recipe = samestep.Recipe(task=task, batch=16, steps=2)
    samestep.train(recipe, layout=layout, **{"threads": 1, "device": "cpu", "log": (), **run})


def step_before_prepare() -> None:
    with samestep.session(device="cpu") as session:
        assert session.trainer is None


def prepare_with_anothers_parameters() -> None:
    with samestep.session(device="cpu") as session:
        session.prepare(nn.Linear(2, 2), torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))


def a_task_with_a_lambda() -> None:
    names = lambda: ["a"]  # noqa: E731
    names.__module__ = "__main__"  # as one of a script
    names.__qualname__ = names.__name__
    train(Built(class_names=names))


def session_of_two() -> None:
    with samestep.session(layout="dp2", device="cpu"):
        pass


CONTRACT: Mapping[str, Callable[[], object]] = {
    "data: train_set()[0]": partial(train, odd.NoisyData()),
    "collate: ": partial(train, odd.NoisyCollate()),
    "model: ": partial(train, odd.Odd(odd_nets.Unseeded)),
    "forward: ": partial(train, odd.Odd(odd_nets.Failing)),
    "loss: ": partial(train, odd.Detached()),
    "parameters: ": partial(train, odd.Odd(odd_nets.PlainList)),
    "draws: the model": partial(train, odd.Odd(drawing_nets.Permuted)),
    "draws: run.compile": partial(train, Built(dropped), compile=True),
    "repeatable: ": partial(train, odd.Odd(odd_nets.Counting)),
    "evaluation: ": partial(train, odd.DrawsInEvaluation()),
    "sum of parts: the loss is a mean": partial(train, odd.MeanWithCount()),
    "sum of parts: the loss counts": partial(train, odd.MeanOfOne()),
    "sum of parts: the loss couples": partial(train, odd.Contrastive()),
    "sum of parts: the model": partial(train, odd.Odd(odd_nets.Centred)),
}

# Page -> the beginning of a message that it shows -> what raises it.
CALLS: Mapping[str, Mapping[str, Callable[[], object]]] = {
    "docs/contract.md": {
        **{f"the task's contract, {beginning}": call for beginning, call in CONTRACT.items()},
        "the model: rand of shape": partial(train, odd.Odd(OneDraw)),
        'engine "accelerate" keeps no': partial(
            train, Built(Used, batch_buffers=lambda: {"usage": "mean"}), engine="accelerate"
        ),
    },
    "docs/own-tasks.md": {
        'layout "fsdp2": the loss': partial(train, penalty_tasks.Smooth(), "fsdp2"),
        "a task or engine object": a_task_with_a_lambda,
        "session.prepare(model, optimizer)": step_before_prepare,
        "session.prepare: the optimizer": prepare_with_anothers_parameters,
        'layout "dp2" needs 2 processes': session_of_two,
        "the data set is empty": partial(train, Built(train_set=list)),
        "train_set(): ": partial(train, odd.TooFew()),
        "the loss gave a Tensor": partial(
            train, Built(loss=lambda output, batch: output.sum()), "single", check=False, folder="alone"
        ),
        "the loss gave a tensor of shape": partial(train, odd.Vector()),
        "model(): table": partial(train, odd.Odd(Looked)),
    },
    "docs/promise.md": {
        "1 (BatchNorm1d) takes": partial(train, Built(normed), "single", micro_batch=4, folder="normed"),
        "the buffer usage is moved on": partial(train, Built(Used), "single", micro_batch=8, folder="used"),
        'layout "fsdp2": the parameter filter': partial(
            check_complex, Filtered(), samestep.Layout.parse("fsdp2"), "fp32"
        ),
        'engine "accelerate": the parameter filter': partial(
            train, Built(Filtered), "single", engine="accelerate", folder="filtered"
        ),
    },
    "docs/less-communication.md": {
        "recipe.communication is bf16 and": partial(
            check_communication, Bf16(), resolve("native"), samestep.Layout.parse("dp2"), "fp16"
        ),
    },
}


def differ(what: str, first: str, second: str) -> str:
    """The message to hosts where two of them differ in a fact."""
    found = consistency.difference({"host": "worker-1", what: first}, {"host": "worker-2", what: second})
    assert found is not None
    return found[1]


FAULT = Fault(
    round=0,
    rank=1,
    cause=f"its process was {ended_by(9)}",
    reason="",
    step=7,
    at="",
    processes=2,
    layout="dp2",
    goes_on_at=6,
    steps_lost=1,
    seconds=1.4,
)

# Page -> the beginning of a message that it shows -> the message as it is printed.
MADE: Mapping[str, Mapping[str, str]] = {
    "docs/faults.md": {"rank 1 failed in step": str(FAULT)},
    "docs/launch.md": {
        "the hosts of this job differ in their samestep": differ("samestep sources", "5a1c08e2d7b4", "c2f09a7be113"),
        "the hosts of this job differ in their script": differ(
            "script", "train.py of SHA-256 1f0e6d...", "train.py of SHA-256 9b1d44..."
        ),
        "the hosts of this job differ in their command": differ("command", "SHA-256 8d9f", "SHA-256 1bfb"),
    },
}
