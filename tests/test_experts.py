"""Mixtures of experts under layouts: experts shared out over ranks, and all other layouts, take the same step."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from expert_models import Words
from proving import Case, prove, same
from resuming import job_of, largest_difference, train_all
from torch import Tensor, nn

import samestep
from samestep.errors import LayoutError
from samestep.layout import Layout
from samestep.parallel.checks import check_asking
from samestep.parallel.experts.find import find_experts
from samestep.parallel.trace import trace
from samestep.verification.proof import Proof

pytestmark = pytest.mark.timeout(400)


def recipe(name: str, **values: Any) -> samestep.Recipe:
    settings = {"batch": 7, "clip": 0.5, "dropout": False, "optimizer": samestep.AdamW(lr=1e-2), **values}
    return samestep.Recipe(task=Words(name=name), **settings)


RECIPES = {name: recipe(name) for name in ("list", "masked", "dense", "dictionary", "stack", "mixtral")}
RECIPES |= {name: recipe(name) for name in ("three", "coupled", "none", "uneven", "scored")}

TWO: Mapping[str, Case] = {
    "a list, in micro-batches": (RECIPES["list"], "ep2", {"micro_batch": 2}),
    "ranks without a token, recomputed": (RECIPES["masked"], "ep2 recompute=full", {"micro_batch": 1}),
    "one layer whole": (RECIPES["list"], "ep2", {"expert_plan": {"layers.0.*": "whole"}}),
    # Layouts that follow a forward, which asks for values here.
    "a list, sliced": (RECIPES["list"], "tp2", {}),
    "a number for each sample, in stages": (RECIPES["scored"], "pp2", {"micro_batch": 2}),
}
MORE_OF_TWO: Mapping[str, Case] = {
    "transformers": (RECIPES["mixtral"], "ep2", {}),
    "uneven, tokens split": (RECIPES["uneven"], "cp2", {}),
    "a list": (RECIPES["list"], "ep2", {}),
    "a dictionary with a buffer": (RECIPES["dictionary"], "ep2", {}),
    "a list, recomputed": (RECIPES["list"], "ep2 recompute=full", {}),
    "ranks without a token": (RECIPES["masked"], "ep2", {"micro_batch": 1}),
    "named": (RECIPES["dense"], "ep2", {"expert_plan": {"layers.*.experts": "split"}}),
    "a stack": (RECIPES["stack"], "ep2", {}),
    "transformers, recomputed": (RECIPES["mixtral"], "ep2 recompute=full", {"micro_batch": 2}),
    "a list, in stages": (RECIPES["list"], "pp2", {"micro_batch": 2}),
    "a list, tokens split": (RECIPES["list"], "cp2", {}),
    "a dictionary, sliced": (RECIPES["dictionary"], "tp2", {}),
    "transformers, tokens split": (RECIPES["mixtral"], "cp2", {}),
}
FOUR: Mapping[str, Case] = {
    "unused experts on shards": (RECIPES["dictionary"], "fsdp2 ep2", {}),
}
ALSO_FOUR: Mapping[str, Case] = {
    f"{name}, {layout}": (RECIPES[name], layout, {"micro_batch": 2} if "pp2" in layout else {})
    for name in ("list", "masked", "stack", "mixtral")
    for layout in (
        "dp2 ep2",
        "fsdp2 ep2",
        "fsdp2 ep2 recompute=full",
        "zero2x2 ep2",
        "zero1x2 ep2",
        "ep2 tp2",
        "ep2 cp2",
        "pp2 ep2",
        "pp2 ep2 schedule=gpipe",
        "ep4",
        "fsdp2 ep2 order=ep.pp.dp.fsdp.cp.tp",
    )
} | {"list, one sample at a time": (RECIPES["list"], "fsdp2 ep2", {"micro_batch": 1})}
REFUSED: Mapping[str, tuple[Case, str]] = {
    "no experts": (
        (RECIPES["none"], "ep2", {}),
        "Net has no experts that ranks could share out: experts are modules alike in an nn.ModuleList",
    ),
    "three experts": (
        (RECIPES["three"], "ep2", {}),
        "layers.0.mixture.experts (ModuleList) has 3 experts, which are not divisible by 2; use ep3, or dp2",
    ),
    "experts of several sizes": (
        (RECIPES["uneven"], "ep2", {}),
        "the modules in layers.0.mixture.experts have parameters of unlike shapes, and ranks share out experts of",
    ),
    "all experts get all tokens": ((RECIPES["dense"], "ep2", {}), 'such as {"layers.*.experts": split}'),
    "experts that take each other's output": (
        (RECIPES["coupled"], "ep2", {}),
        'use run.expert_plan: {"layers.0.mixture.experts": whole}',
    ),
    "a plan without a module": (
        (RECIPES["list"], "ep2", {"expert_plan": {"layers.*.expert": "split"}}),
        'run.expert_plan: the model has no module "layers.*.expert"',
    ),
    "a plan for what is none": (
        (RECIPES["list"], "ep2", {"expert_plan": {"layers.0.attention": "split"}}),
        'run.expert_plan: layers.0.attention (Attention) can\'t be "split"',
    ),
    "compiled": ((RECIPES["list"], "ep2", {"compile": True}), "are not compiled yet"),
}


@pytest.fixture(scope="module")
def two() -> Mapping[str, Proof | str]:
    return prove({**TWO, **{name: case for name, (case, _) in REFUSED.items()}}, steps=2)


def test_two_ranks_take_the_same_step(two: Mapping[str, Proof | str]) -> None:
    assert same(two, list(TWO)) == {}


@pytest.mark.slow
def test_two_ranks_take_the_same_step_with_more_models() -> None:
    assert same(prove(MORE_OF_TWO, steps=2), list(MORE_OF_TWO)) == {}


@pytest.mark.parametrize("case", REFUSED)
def test_what_can_not_be_shared_out_is_refused_with_what_to_use(case: str, two: Mapping[str, Proof | str]) -> None:
    said = two[case]
    assert isinstance(said, str), said
    assert REFUSED[case][1] in said
    assert "\n" not in said


@pytest.mark.slow
def test_four_ranks_take_the_same_step() -> None:
    assert same(prove(FOUR, steps=2), list(FOUR)) == {}


@pytest.mark.slow
def test_four_ranks_take_the_same_step_under_every_layout() -> None:
    assert same(prove(ALSO_FOUR, steps=2), list(ALSO_FOUR)) == {}


def test_dropout_in_experts_is_refused() -> None:
    task = Words(name="dropping")
    with pytest.raises(samestep.UserError, match=r"has dropout in its experts.*use dropout after them"):
        find_experts(task.model(), task.collate([0, 1]).inputs, Layout.parse("ep2"))


class Deciding(nn.Module):
    """Asks for values in the first of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), Positive() if n == 0 else nn.ReLU()) for n in (0, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Positive(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if bool((x > 0).all()) else x.abs()


def test_a_decision_that_a_part_of_the_model_would_not_share_is_refused() -> None:
    inside = Deciding()
    seen = trace(inside, torch.randn(2, 3, 4))
    assert dict(seen.asking) == {"layers.0.1": "__bool__"}
    check_asking(inside, Layout.parse("pp2"), seen)
    check_asking(inside, Layout.parse("tp2"), seen)
    with pytest.raises(
        LayoutError, match=r"the forward of layers\.0\.1 \(Positive\) asks for values \(__bool__\), and a"
    ):
        check_asking(inside, Layout.parse("cp2"), seen)


def test_no_plan_depends_on_which_experts_samples_choose() -> None:
    task = Words(name="list")
    model = task.model()
    calls = {call.name for number in (0, 4) for call in trace(model, task.collate([number]).inputs[:, :1]).calls}
    for number in (0, 4):  # one token, which chooses two of four experts
        seen = trace(model, task.collate([number]).inputs[:, :1])
        assert {call.name for call in seen.calls} == calls
        assert all(f"layers.0.mixture.experts.{expert}.up" in calls for expert in range(4))
        assert "layers.0.mixture.experts.3.up.weight" in seen.behind(seen.of("")[0].outputs())


@pytest.mark.slow
def test_others_go_on_from_what_ranks_with_parts_of_the_experts_saved(tmp_path: Path) -> None:
    """With dropout of what the experts give, and evaluations, in float64."""
    settings = recipe("list", dropout=True, precision="fp64", steps=4)
    (alone,) = train_all([job_of(settings, "single", tmp_path / "alone")])
    saving = job_of(settings, "ep2", tmp_path / "ep2", checkpoint=samestep.Checkpointing(every=2))
    (saved,) = train_all([saving])
    assert largest_difference(saved.losses, alone.losses) < 1e-9
    resume = samestep.Checkpointing(resume=str(saved.folder / "checkpoints" / "step-2"))
    others = ("single", "ep2", "fsdp2")
    resumed = train_all([job_of(settings, each, tmp_path / each / "on", checkpoint=resume) for each in others])
    for layout, result in zip(others, resumed, strict=True):
        assert result.first_step == 2
        assert largest_difference(result.losses, alone.losses[2:]) < 1e-9, layout
    assert resumed[1].losses == saved.losses[2:]


def test_a_term_that_balances_a_batch_is_no_sum_of_parts() -> None:
    task = Words(name="list", balance=True)
    found = samestep.check(samestep.Recipe(task=task, batch=7, steps=2, dropout=False), threads=1)
    assert not found.kept
    assert "the loss couples the samples of a batch" in str(found.contract)
