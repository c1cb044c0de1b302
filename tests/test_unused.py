"""Branches that some samples take, frozen and tied parameters, groups of their own: the step of one process."""

from typing import Any

import own_loops
import pytest
import torch
from own_loops import Case
from proving import assert_same_steps
from small_tasks import Points
from torch import Tensor, nn

import samestep
from samestep.engines.base import Preparation
from samestep.engines.native.engine import Native
from samestep.engines.native.trainer import NativeTrainer

BATCH, STEPS = 13, 7


class Block(nn.Module):
    """A layer with two experts; the sign of a sample's last feature chooses one."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(7, 7) for _ in range(2))
        self.shared = nn.Linear(7, 7)

    def forward(self, hidden: Tensor) -> Tensor:
        out = self.shared(hidden)
        for number, expert in enumerate(self.experts):
            chosen = (hidden[:, -1] > 0) == bool(number)
            if chosen.any():
                out = out.index_add(0, chosen.nonzero()[:, 0], expert(hidden[chosen]))
        return torch.tanh(out)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 7)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.frozen = nn.ModuleList(Block() for _ in range(2)).requires_grad_(False)
        self.rare = nn.Linear(4, 7)
        self.never = nn.Linear(7, 7)
        self.last = nn.Linear(7, 7)
        self.last.weight = self.blocks[1].get_submodule("shared").weight  # pyright: ignore[reportAttributeAccessIssue]
        self.head = nn.Linear(7, 3)
        self.aside = nn.Linear(7, 1)
        self.register_buffer("constant", torch.full((7,), 1.5))

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.first(inputs) * self.constant
        odd = inputs[:, 1] > 1.2
        if odd.any():  # about one sample in nine
            hidden = hidden + self.rare(inputs) * odd[:, None]
        for block in [*self.blocks, *self.frozen]:
            hidden = block(hidden)
        return self.head(self.last(hidden)), self.aside(hidden)  # the second is for no loss


class Branches(Points, own_loops.Looped):
    def model(self) -> nn.Module:
        return Branching()

    def loss(self, output: Any, batch: samestep.Batch) -> tuple[Tensor, Tensor | int]:
        return super().loss(output[0], batch)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Three groups, with rates and decays of their own; frozen parameters stand in one of them."""
        blocks = list(model.get_submodule("blocks").parameters())
        head = list(model.get_submodule("head").parameters())
        known = {id(parameter) for parameter in (*blocks, *head)}
        rest = [parameter for parameter in model.parameters() if id(parameter) not in known]
        return torch.optim.AdamW(
            [
                {"params": blocks, "lr": 0.02, "weight_decay": 0.3},
                {"params": head, "lr": 0.005, "weight_decay": 0.0},
                {"params": rest, "weight_decay": 0.2},
            ],
            lr=0.01,
        )


class ZerosKept(Native):
    """The mistake: what no rank used has a gradient of zeros, with which AdamW decays and moves it."""

    def prepare(self, model: nn.Module, how: Preparation) -> NativeTrainer:
        trainer = super().prepare(model, how)
        used = trainer._spread._used  # pyright: ignore[reportAttributeAccessIssue]
        used.settle = lambda: None
        return trainer


def cases(*each: tuple[str, int | None]) -> list[Case]:
    return [Case(layout=layout, micro_batch=micro_batch) for layout, micro_batch in each]


RANKS = {
    1: cases(("single", None), ("single", 3)),
    2: [*cases(("dp2", 3), ("zero1x2", 2), ("fsdp2", 3)), Case(layout="dp2", engine=ZerosKept())],
    4: cases(("dp2 fsdp2", 2), ("dp2 zero1x2", None)),
}
MORE_OF_TWO = cases(("dp2", None), ("zero2x2", None), ("fsdp2", None))


@pytest.fixture(scope="module")
def expected() -> own_loops.Taken:
    # 31 samples in batches of 13: every third step has 5, for 2 ranks or 4.
    return own_loops.plain(Branches(samples=31), batch=BATCH, steps=STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_branches_frozen_parameters_and_groups_take_the_same_step(ranks: int, expected: own_loops.Taken) -> None:
    taken = own_loops.under(RANKS[ranks], Branches(samples=31), batch=BATCH, steps=STEPS, ranks=ranks)
    for case, each in zip(RANKS[ranks], taken, strict=True):
        apart = own_loops.far(each, expected)
        assert apart > 1e-3 if isinstance(case.engine, ZerosKept) else apart < 1e-10, (case, apart)


@pytest.mark.slow
def test_more_layouts_take_the_same_step(expected: own_loops.Taken) -> None:
    taken = own_loops.under(MORE_OF_TWO, Branches(samples=31), batch=BATCH, steps=STEPS, ranks=2)
    for case, each in zip(MORE_OF_TWO, taken, strict=True):
        assert own_loops.far(each, expected) < 1e-10, case


class Adapted(nn.Module):
    """Blocks alone, of whose experts a rank's samples use some: as a model with an adapter for each language."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 7)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(7, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


class Adapters(Points):
    def model(self) -> nn.Module:
        return Adapted()


@pytest.mark.slow
def test_hybrids_take_branches_that_samples_choose() -> None:
    recipe = samestep.Recipe(
        task=Adapters(samples=20), batch=4, steps=4, clip=0.1, optimizer=samestep.AdamW(lr=0.01, weight_decay=0.2)
    )
    layouts = ("pp2 fsdp2", "pp2 zero1x2", "fsdp2 tp2")
    assert_same_steps([(recipe, layout, {}) for layout in layouts], steps=4)


def test_what_no_sample_used_keeps_its_weights(expected: own_loops.Taken) -> None:
    torch.manual_seed(0)
    before = Branching().state_dict()
    for name in ("never.weight", "aside.weight", "frozen.0.shared.weight"):
        assert torch.equal(expected.state[name], before[name].double())
    assert not torch.equal(expected.state["rare.weight"], before["rare.weight"].double())


class Filled(nn.Module):
    """Keeps a mean of what it saw, as some normalising layers do, and counts its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, inputs: Tensor) -> Tensor:
        self.steps += 1
        self.follow(inputs.mean(0))
        return self.linear(inputs - self.mean)

    def follow(self, mean: Tensor) -> None:
        self.mean = 0.9 * self.mean + 0.1 * mean


class Counting(Filled):
    def follow(self, mean: Tensor) -> None: ...


class FilledPastItsVersion(Filled):
    """As codebooks are: PyTorch's count of writes stays as it was."""

    def follow(self, mean: Tensor) -> None:
        self.mean.data.lerp_(mean, 0.1)


class FilledAsAnArray(Filled):
    def follow(self, mean: Tensor) -> None:
        self.mean.numpy()[:] = 0.9 * self.mean.numpy() + 0.1 * mean.numpy()


class Fills(Points, own_loops.Looped):
    """Each model that it makes fills its buffer in another way."""

    ways = (Counting, Filled, FilledPastItsVersion, FilledAsAnArray)

    def __init__(self) -> None:
        super().__init__()
        self.made = 0

    def model(self) -> nn.Module:
        self.made += 1
        return self.ways[(self.made - 1) % len(self.ways)]()


def test_a_buffer_that_is_filled_from_samples_is_refused() -> None:
    ways = cases(*[("dp2", None)] * len(Fills.ways))
    counting, *filled = own_loops.under(ways, Fills(), batch=8, steps=2, ranks=2)
    assert isinstance(counting, own_loops.Taken), counting
    assert counting.state["steps"] == 2
    for message in filled:
        assert "the buffer mean of the model has other values on other ranks after a step" in message
