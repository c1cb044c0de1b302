"""Batch norm takes one process's statistics under every layout of data ranks, and refuses what can't."""

import own_loops
import pytest
import torch
from own_loops import Case
from small_tasks import Points
from torch import Tensor, nn

import samestep
from samestep.engines.base import Preparation
from samestep.engines.native.engine import Native
from samestep.engines.native.trainer import NativeTrainer

BATCH, STEPS = 13, 7


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(12, 12, bias=False), nn.BatchNorm1d(12, momentum=0.3)

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.linear(hidden)))


class Fused(nn.BatchNorm1d):
    """A batch norm whose own forward goes on, as those of image models do."""

    def forward(self, input: Tensor) -> Tensor:
        return torch.tanh(super().forward(input.contiguous()))


class FusedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(12, 12, bias=False), Fused(12, momentum=0.3)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.norm(self.linear(hidden))


class Normed(nn.Module):
    def __init__(self, *, sync: bool) -> None:
        super().__init__()
        self.first = nn.Linear(4, 12)
        self.blocks = nn.ModuleList([Block(), FusedBlock()])
        self.lines = nn.BatchNorm1d(3, momentum=None)  # type: ignore[arg-type]  # a cumulative average
        self.planes = nn.SyncBatchNorm(3) if sync else nn.BatchNorm2d(3)
        self.cubes = nn.BatchNorm3d(3, affine=False)
        self.untracked = nn.BatchNorm1d(12, track_running_stats=False)
        self.last = nn.Linear(12, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        hidden = self.lines(hidden.view(-1, 3, 4)).tanh() + 100.0  # a mean that is large beside what varies
        hidden = self.planes(hidden.view(-1, 3, 2, 2))
        hidden = self.cubes(hidden.view(-1, 3, 2, 2, 1).tanh())
        return self.last(self.untracked(hidden.flatten(1).tanh()))


class Images(Points, own_loops.Looped):
    sync = True

    def model(self) -> nn.Module:
        return Normed(sync=self.sync)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        # Over two samples a norm gives 1 and -1 whatever they are: gradients of nearly nothing, which AdamW blows up.
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


class WithoutSync(Images):
    sync = False  # PyTorch's own refuses to train on a CPU


class Local(Native):
    """The mistake: every rank normalises by its own samples, in one layer."""

    def prepare(self, model: nn.Module, how: Preparation) -> NativeTrainer:
        trainer = super().prepare(model, how)
        vars(model.get_submodule("lines")).pop("forward")
        return trainer


@pytest.fixture(scope="module")
def expected() -> own_loops.Taken:
    # 28 samples in batches of 13: every third step has 2, for three ranks, one of which has a zero-weight sample.
    return own_loops.plain(WithoutSync(samples=28), batch=BATCH, steps=STEPS)


@pytest.mark.parametrize("case", [Case(), Case(micro_batch=13), Case(layout="single recompute=full")])
def test_one_process_is_as_it_was(case: Case, expected: own_loops.Taken) -> None:
    taken = own_loops.take(case, Images(samples=28), BATCH, STEPS)
    assert own_loops.far(taken, expected) < 1e-10


def test_statistics_are_those_of_the_global_batch(expected: own_loops.Taken) -> None:
    cases = [
        Case(layout="dp3"),
        Case(layout="dp3", engine=Local()),
        Case(layout="dp3", micro_batch=3),
    ]
    *right, local, refused = own_loops.under(cases, Images(samples=28), batch=BATCH, steps=STEPS, ranks=3)
    for taken in right:
        assert own_loops.far(taken, expected) < 1e-10
    # With statistics of each rank's own rows the first step would be another one.
    assert "the buffer lines.running_mean of the model has other values on other ranks" in local
    assert refused == (
        "blocks.0.norm (BatchNorm1d) takes its statistics from the whole batch, and a step of 2 micro-batches a rank "
        "never has it at once; use run.micro_batch: null, group norm or layer norm"
    )


def test_a_pipeline_takes_the_batch_in_one_micro_batch(expected: own_loops.Taken) -> None:
    cases = [
        Case(layout="pp2"),
        Case(layout="pp2", micro_batch=5),
    ]
    *right, refused = own_loops.under(cases, Images(samples=28), batch=BATCH, steps=STEPS, ranks=2)
    for taken in right:
        assert own_loops.far(taken, expected) < 1e-10
    assert isinstance(refused, str)
    assert "a step of 3 micro-batches a rank never has it at once; use run.micro_batch: null" in refused


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "ranks"),
    [
        (Case(layout="pp2 schedule=zbv-zero-bubble"), 2),
        (Case(layout="pp2 schedule=gpipe recompute=full"), 2),
        (Case(layout="fsdp3 recompute=full", micro_batch=5), 3),  # the largest slice has 5
    ],
)
def test_other_schedules_and_shards_that_recompute(case: Case, ranks: int, expected: own_loops.Taken) -> None:
    (taken,) = own_loops.under([case], Images(samples=28), batch=BATCH, steps=STEPS, ranks=ranks)
    assert own_loops.far(taken, expected) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["pp2 dp2", "pp2 fsdp2", "pp4", "pp2 tp2"])
def test_a_pipeline_takes_the_statistics_of_all_its_replicas(layout: str, expected: own_loops.Taken) -> None:
    (taken,) = own_loops.under([Case(layout=layout)], Images(samples=28), batch=BATCH, steps=STEPS, ranks=4)
    assert own_loops.far(taken, expected) < 1e-10


def test_one_process_refuses_micro_batches() -> None:
    with pytest.raises(
        samestep.UserError, match=r"blocks.0.norm \(BatchNorm1d\) takes its statistics from the whole"
    ):
        samestep.verify(samestep.Recipe(task=Images(), batch=BATCH), micro_batch=4)


class Evaluating(nn.Module):
    """`train()` leaves batch norms in evaluation, as where a detector is fine-tuned with the statistics it has."""

    def __init__(self, *, tracked: bool) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 12), nn.BatchNorm1d(12, track_running_stats=tracked)
        self.second, self.last = nn.Linear(12, 12), nn.Linear(12, 3)

    def train(self, mode: bool = True) -> "Evaluating":
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.second(self.norm(self.first(inputs)).tanh()).tanh())


class Kept(Images):
    def model(self) -> nn.Module:
        return Evaluating(tracked=True)


class NeverKept(Images):
    """Without statistics of its own a batch norm takes those of its rows in evaluation, too."""

    def model(self) -> nn.Module:
        return Evaluating(tracked=False)


@pytest.mark.parametrize("layout", ["single", pytest.param("pp2", marks=pytest.mark.slow)])
def test_statistics_that_are_kept_divide_into_micro_batches(layout: str) -> None:
    proof = samestep.verify(samestep.Recipe(task=Kept(), batch=BATCH), layout=layout, micro_batch=4, steps=2)
    assert proof.same_step, proof


def test_statistics_that_are_never_kept_are_those_of_the_global_batch() -> None:
    recipe = samestep.Recipe(task=NeverKept(), batch=BATCH)
    proof = samestep.verify(recipe, layout="dp3", steps=2)
    assert proof.same_step, proof
    with pytest.raises(samestep.UserError, match=r"norm \(BatchNorm1d\) takes its statistics from the whole batch"):
        samestep.verify(recipe, micro_batch=4)
