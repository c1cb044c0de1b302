"""Buffers that are a mean or a sum over the batch are those of one process, wherever a rank has whole samples."""

from dataclasses import replace

import own_loops
import pytest
import torch
from own_loops import Case
from small_tasks import Points
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import samestep
from samestep.engines.base import Preparation
from samestep.engines.native.engine import Native
from samestep.engines.native.trainer import NativeTrainer

BATCH, STEPS = 13, 5


class Routed(nn.Module):
    """Four experts, a moving average of how often each is chosen, which balances the choice, and a count."""

    usage: Tensor
    chosen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(12, 4), nn.Linear(12, 48)
        self.register_buffer("usage", torch.full((4,), 0.25))
        self.register_buffer("chosen", torch.zeros(4, dtype=torch.long))

    def forward(self, hidden: Tensor) -> Tensor:
        scores = self.gate(hidden).softmax(-1) - self.usage  # [samples, experts]
        hits = nn.functional.one_hot(scores.argmax(-1), 4)
        if self.training:
            with torch.no_grad():
                self.usage.lerp_(hits.to(self.usage.dtype).mean(0), 0.1)
                self.chosen += hits.sum(0)
        every = self.experts(hidden).unflatten(-1, (4, 12))  # [samples, experts, features]
        return hidden + (every * (hits * scores).unsqueeze(-1)).sum(1)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 12), nn.Linear(12, 3)
        self.blocks = nn.ModuleList(Routed() for _ in range(2))

    def forward(self, points: Tensor) -> Tensor:
        hidden = self.first(points)
        for block in self.blocks:
            hidden = block(hidden)
        return self.last(hidden)


class Balanced(Points, own_loops.Looped):
    def model(self) -> nn.Module:
        return Model()

    def batch_buffers(self) -> dict[str, str]:
        return {"*.usage": "mean", "*.chosen": "sum"}


class Unnamed(Balanced):
    def batch_buffers(self) -> dict[str, str]:
        return {}


@pytest.fixture(scope="module")
def expected() -> own_loops.Taken:
    return own_loops.plain(Balanced(samples=28), batch=BATCH, steps=STEPS)


def test_one_process_is_as_it_was(expected: own_loops.Taken) -> None:
    for case in (Case(), Case(micro_batch=4), Case(layout="single recompute=full")):
        assert own_loops.far(own_loops.take(case, Balanced(samples=28), BATCH, STEPS), expected) < 1e-10
    # Some expert has had more samples than another, or the test would see nothing.
    assert expected.state["blocks.0.chosen"].unique().numel() > 1


@pytest.mark.slow
def test_many_ranks_join_theirs(expected: own_loops.Taken) -> None:
    cases = [
        Case(layout="dp2"),
        Case(layout="dp2", micro_batch=3),
        Case(layout="fsdp2 recompute=full"),
        Case(layout="pp2"),
    ]
    for taken in own_loops.under(cases, Balanced(samples=28), batch=BATCH, steps=STEPS, ranks=2):
        assert own_loops.far(taken, expected) < 1e-10


class Compared(nn.Module):
    """Two layers with spectral norm, each called twice in a forward, as a GAN's discriminator is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 12), nn.Linear(12, 3)
        self.blocks = nn.ModuleList(parametrizations.spectral_norm(nn.Linear(12, 12)) for _ in range(2))

    def forward(self, points: Tensor) -> Tensor:
        hidden = self.first(points)
        for block in self.blocks:
            hidden = hidden + block(hidden).tanh() - block(hidden.square()).tanh()
        return self.last(hidden)


class Normed(Points, own_loops.Looped):
    def model(self) -> nn.Module:
        return Compared()


@pytest.mark.slow
def test_vectors_of_spectral_norm_move_as_in_one_process_by_themselves() -> None:
    task = Normed(samples=28)
    expected = own_loops.plain(task, batch=BATCH, steps=STEPS)
    for case in (Case(micro_batch=4), Case(layout="single recompute=full", micro_batch=5)):
        assert own_loops.far(own_loops.take(case, task, BATCH, STEPS), expected) < 1e-10
    cases = [
        Case(layout="dp2"),
        Case(layout="dp2", micro_batch=3),
        Case(layout="fsdp2 recompute=full"),
        Case(layout="pp2"),
    ]
    for taken in own_loops.under(cases, task, batch=BATCH, steps=STEPS, ranks=2):
        assert own_loops.far(taken, expected) < 1e-10


def test_without_a_name_they_are_refused_and_the_name_is_said() -> None:
    cases = [Case(layout="dp2"), Case(layout="pp2")]
    ranks, stages = own_loops.under(cases, Unnamed(samples=28), batch=BATCH, steps=STEPS, ranks=2)
    assert "the buffer blocks.0.usage of the model has other values on other ranks" in ranks
    assert 'have the task\'s batch_buffers() give {"blocks.0.usage": "mean"} or "sum"' in ranks
    assert "is moved on by every training forward" in stages
    assert 'usage": "mean"} or "sum"' in stages


class Wrong(Balanced):
    def __init__(self, named: dict[str, str]) -> None:
        super().__init__(samples=28)
        self.named = named

    def batch_buffers(self) -> dict[str, str]:
        return self.named


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ({"*.usages": "mean"}, 'the model has no buffer "*.usages"; it has blocks.0.usage, blocks.0.chosen'),
        ({"*.usage": "max"}, '*.usage is "max"; use mean or sum'),
        ({"*.chosen": "mean"}, 'blocks.0.chosen holds int64, which have no mean; use "sum"'),
    ],
)
def test_wrong_names_are_one_sentence(named: dict[str, str], said: str) -> None:
    with pytest.raises(samestep.UserError) as caught:
        samestep.verify(samestep.Recipe(task=Wrong(named), batch=8, steps=2), micro_batch=4, check=False, threads=1)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_engines_that_keep_none_refuse_them() -> None:
    with pytest.raises(samestep.UserError, match=r'engine "keras-mirrored" keeps no batch_buffers'):
        samestep.train(samestep.Recipe(task=Balanced(), batch=8, steps=2), engine="keras-mirrored", threads=1)


class Forgotten(Native):
    """The mistake: every rank keeps what its own samples made of the buffers."""

    def prepare(self, model: nn.Module, how: Preparation) -> NativeTrainer:
        trainer = super().prepare(model, replace(how, details=replace(how.details, batch_buffers={})))
        trainer._spread._buffers_checked = True  # type: ignore[attr-defined]
        return trainer


class CountedOnly(Balanced):
    """The buffer changes nothing but itself."""

    def model(self) -> nn.Module:
        return nn.Sequential(Counter(), nn.Linear(4, 3))

    def batch_buffers(self) -> dict[str, str]:
        return {"0.seen": "mean"}


class Counter(nn.Module):
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, points: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.seen.lerp_(points.mean(0), 0.1)
        return points


class InRoot(Model):
    """The buffer belongs to the model itself, of which every stage runs a part."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, points: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(points.mean(0), 0.1)
        return super().forward(points)


class Rooted(Balanced):
    def model(self) -> nn.Module:
        return InRoot()

    def batch_buffers(self) -> dict[str, str]:
        return {**super().batch_buffers(), "mean": "mean"}


def test_a_buffer_of_what_every_stage_runs_is_refused_in_a_pipeline() -> None:
    ranks, stages = own_loops.under(
        [Case(layout="dp2"), Case(layout="pp2")], Rooted(samples=28), batch=BATCH, steps=STEPS, ranks=2
    )
    assert own_loops.far(ranks, own_loops.plain(Rooted(samples=28), batch=BATCH, steps=STEPS)) < 1e-10
    assert "the buffer mean (batch_buffers()) belongs to InRoot, whose forward every stage runs a part of" in stages


def test_a_proof_compares_buffers_that_nothing_else_shows() -> None:
    recipe = samestep.Recipe(task=CountedOnly(samples=28), batch=13, steps=3)
    right = samestep.verify(recipe, layout="dp2", threads=1)
    wrong = samestep.verify(recipe, layout="dp2", engine=Forgotten(), threads=1)
    assert right.same_step, right
    assert not wrong.same_step
    assert wrong.worst_parameter == "0.seen (a buffer)"
    assert wrong.max_relative_difference["parameters"] > 1e-3
    assert wrong.max_relative_difference["loss"] < 1e-10
