"""Models and losses that send messages themselves are refused in the first step on ranks, with the place."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from small_tasks import Points
from torch import Tensor, nn
from torch.distributed import all_reduce
from torch.distributed.nn import functional

import samestep
from samestep.api import verify_layouts
from samestep.errors import UserError
from samestep.job import Job, Run
from samestep.launch import local
from samestep.launch.world import join
from samestep.layout import Layout
from samestep.parallel.exact.float64 import in_float64
from samestep.parallel.own_backwards import own_backwards_refused
from samestep.training.fit import Training


class Gathered(torch.autograd.Function):
    """As libraries spread their experts: gather rows of all ranks, and give each its own slice's gradient."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, rows.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].chunk(dist.get_world_size())[dist.get_rank()]


class Spread(nn.Module):
    """Sends as soon as there is a process group of several ranks."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.linear = nn.Linear(4, 3)

    def forward(self, points: Tensor) -> Tensor:
        rows = self.linear(points)
        if not (dist.is_initialized() and dist.get_world_size() > 1):
            return rows
        if self.way == "gathered":
            return Gathered.apply(rows)[: len(rows)]
        if self.way == "functional":
            return functional.all_reduce(rows) / 2
        dist.all_reduce(rows.detach().clone())
        return rows


class Spreading(Points):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def model(self) -> nn.Module:
        return Spread(self.way)


class Codebook(nn.Module):
    """Counts over all ranks with a function that it took when it was built, or by a name that its file imported."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.linear, self.way = nn.Linear(4, 4), way
        spread = dist.is_initialized() and dist.get_world_size() > 1
        self.all_reduce_fn = dist.all_reduce if spread and way == "held" else None
        self.summed = partial(summed) if spread and way == "imported" else None

    def forward(self, points: Tensor) -> Tensor:
        rows = self.linear(points)
        for sum_up in filter(None, (self.all_reduce_fn, self.summed)):
            sum_up(rows.detach().sum(0))
        return rows


def summed(total: Tensor) -> None:
    all_reduce(total)


class Counting(Points):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def model(self) -> nn.Module:
        return nn.Sequential(Codebook(self.way), nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)))


class Again(torch.autograd.Function):
    """Computes a module once more in backward, by a backward of its own, as reversible layers do."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, module: nn.Module) -> Tensor:
        ctx.module = module
        ctx.save_for_backward(rows)
        return module(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        (rows,) = ctx.saved_tensors
        with torch.enable_grad():
            torch.manual_seed(1)  # for the same draws: there are none
            rows = rows.detach().requires_grad_()
            ctx.module(rows).backward(gradient)
        return rows.grad, None


class Reversible(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, points: Tensor) -> Tensor:
        return self.last(Again.apply(self.first(points), self.middle))


class TakenAgain(Points):
    def model(self) -> nn.Module:
        return Reversible()


class SpreadLoss(Points):
    def loss(self, output: Tensor, batch: samestep.Batch) -> Any:
        total, count = super().loss(output, batch)
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(torch.tensor(float(count)))
        return total, count


class Synchronized(Points):
    """PyTorch's own module sends: no message of the model's."""

    def model(self) -> nn.Module:
        return nn.SyncBatchNorm.convert_sync_batchnorm(super().model())


CASES: Mapping[str, tuple[samestep.Task, str]] = {
    "gathered": (Spreading("gathered"), "dp2"),
    "functional": (Spreading("functional"), "dp2"),
    "reduced": (Spreading("reduced"), "fsdp2"),
    "loss": (SpreadLoss(), "dp2"),
    "held, in slices": (Counting("held"), "tp2"),
    "imported, in slices": (Counting("imported"), "tp2"),
    "taken again": (TakenAgain(), "dp2"),
    "taken again, in shards": (TakenAgain(), "fsdp2"),
    "right": (Points(), "dp2"),
    "right where all ranks have samples of their own": (Counting("held"), "dp2"),
    "right shards": (Points(), "fsdp2"),
    "right slices": (Points(), "tp2"),
    "right stages": (Points(), "pp2"),
    "synchronized": (Synchronized(), "dp2"),
}


def messages() -> dict[str, str]:
    told = {}
    with join(device="cpu", threads=1) as world:
        for name, (task, layout) in CASES.items():
            recipe = samestep.Recipe(task=task, batch=8, steps=1, optimizer=samestep.SGD(lr=0.1))
            job = Job(recipe=recipe, run=Run(layout=layout, threads=1))
            told[name] = ""
            try:
                for _ in Training(job, task, world, Layout.parse(layout)).steps(stop=1):
                    pass
            except UserError as error:
                told[name] = str(error)
    return told


def message_of_a_stage() -> None:
    """Step with a codebook in the first of two stages; the rank of the other one would wait."""
    recipe = samestep.Recipe(task=Counting("held"), batch=8, steps=1, optimizer=samestep.SGD(lr=0.1))
    with join(device="cpu", threads=1) as world:
        job = Job(recipe=recipe, run=Run(layout="pp2", threads=1))
        list(Training(job, recipe.task, world, Layout.parse("pp2")).steps(stop=1))


@pytest.fixture(scope="module")
def told() -> dict[str, str]:
    return local.start(messages, (), 2)


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("gathered", "all_gather, forward at "),
        ("functional", "all_reduce, forward at "),
        ("reduced", "all_reduce, forward at "),
        ("loss", "all_reduce, loss at "),
        ("held, in slices", "all_reduce, forward at "),
        ("imported, in slices", "all_reduce, summed at "),
    ],
)
def test_the_call_is_named_with_its_place(told: Mapping[str, str], name: str, where: str) -> None:
    assert told[name].startswith(f"the model or the loss sends messages itself ({where}")
    assert "test_own_messages.py:" in told[name]
    assert "is_distributed=False" in told[name]


@pytest.mark.parametrize(("name", "layout"), [("taken again", "dp2"), ("taken again, in shards", "fsdp2")])
def test_a_backward_inside_of_the_backward_is_refused(told: Mapping[str, str], name: str, layout: str) -> None:
    assert told[name].startswith(f'layout "{layout}": the backward of Reversible runs another one inside (backw')
    assert "test_own_messages.py:" in told[name]
    assert "use one process" in told[name]


def test_a_backward_inside_of_the_backward_is_found_below_a_mode() -> None:
    model = Reversible()
    with (
        own_backwards_refused(model, Layout.parse("dp2")),
        pytest.raises(UserError, match=r"the backward of Reversible runs another one inside \(backw"),
        in_float64(),  # a mode, below which models that cast are proved
    ):
        model(torch.ones(2, 4)).sum().backward()


def test_one_process_takes_it_and_a_seed_is_no_draw(tmp_path: Path) -> None:
    recipe = samestep.Recipe(task=TakenAgain(), batch=8, steps=2, optimizer=samestep.SGD(lr=0.1))
    assert samestep.train(recipe, threads=1, log=(), folder=tmp_path).steps == 2


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith(("right", "synch"))])
def test_messages_of_layouts_and_of_pytorchs_modules_are_no_fault(told: Mapping[str, str], name: str) -> None:
    assert told[name] == ""


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_what_one_stage_alone_would_wait_for_is_refused() -> None:
    with pytest.raises(UserError, match="the model or the loss sends messages itself \\(all_reduce, forward at "):
        local.start(message_of_a_stage, (), 2)


def test_a_backward_of_the_models_own_is_refused_before_ranks_of_any_layout_start() -> None:
    """The contract is held once, for one process and for the layouts that follow."""
    recipe = samestep.Recipe(task=TakenAgain(), batch=8, steps=1, optimizer=samestep.SGD(lr=0.1))
    with pytest.raises(UserError, match=r'layout "fsdp2": the backward of Reversible runs another one inside'):
        verify_layouts(Job(recipe=recipe), ["recompute=full", "no layout", "fsdp2", "pp2"])
