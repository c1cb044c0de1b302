"""Parameters that heads, features or experts share take the step of one process, or leave their layers whole."""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from holding_nets import NETS, Holding
from proving import Case, prove, same
from resuming import job_of, largest_difference, train_all
from torch import nn

import samestep
from samestep import Checkpointing
from samestep.engines.base import Preparation
from samestep.engines.native.engine import Native
from samestep.engines.native.trainer import NativeTrainer
from samestep.parallel.context import split
from samestep.parallel.tensor import apply
from samestep.parallel.tensor.regions import Regions
from samestep.verification.proof import Proof


class Unaware(Native):
    """Parameters that units use on slices are taken for whole ones; `compares`: gradients are compared."""

    def __init__(self, *, compares: bool) -> None:
        self.compares = compares

    def prepare(self, model: nn.Module, how: Preparation) -> NativeTrainer:
        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(apply, "find_regions", return_value=Regions()))
            for module in () if self.compares else (apply, split):
                stack.enter_context(mock.patch.object(module, "can_compare", return_value=False))
            return super().prepare(model, how)


def recipe(name: str, **values: Any) -> samestep.Recipe:
    settings = {"batch": 8, "steps": 6, "clip": 0.5, "dropout": False, "optimizer": samestep.AdamW(lr=1e-2)}
    return samestep.Recipe(task=Holding(name=name), **{**settings, **values})


def cases(layouts: Mapping[str, tuple[str, ...]]) -> dict[str, Case]:
    """Each layout with each of its nets."""
    recipes = {name: recipe(name) for name in dict.fromkeys(name for names in layouts.values() for name in names)}
    return {f"{layout}: {name}": (recipes[name], layout, {}) for layout, names in layouts.items() for name in names}


FAST = cases(
    {
        "tp2": ("scaled", "told, in and out"),  # slow tests have every net
        "tp2 sequence=split": ("told",),
    }
)
BESIDE = cases(
    {
        "dp2 tp2": ("scaled", "told, in and out"),
        "fsdp2 tp2": ("scaled", "gated", "tied", "gated by input"),
        "zero1x2 tp2": ("scaled", "gated", "tied"),
        "zero2x2 tp2": ("gated",),
        "pp2 tp2": ("scaled", "gated", "table", "gated by input", "perceptron"),
        "cp2": ("fused", "told", "told, in and out"),
        "cp2 tp2": ("fused", "scaled", "told", "gated", "masked"),
        "dp2 tp2 sequence=split": ("gated", "told by head"),
        "ep2 tp2": ("experts",),
        "tp4": ("scaled", "gated"),
    }
)
UNAWARE = {
    "slices and a tensor of the input": (recipe("gated by input"), "tp2", {"engine": Unaware(compares=True)}),
}
UNAWARE_SLICES: Case = (recipe("scaled"), "tp2", {"engine": Unaware(compares=True)})
BEHIND_ZEROS: Case = (recipe("scaled, zero at first"), "tp2", {"engine": Unaware(compares=True)})
NOT_COMPARED: Mapping[str, Case] = {
    "slices": (recipe("scaled"), "tp2", {"engine": Unaware(compares=False)}),
    "split tokens": (recipe("remembered by token"), "cp2", {"engine": Unaware(compares=False)}),
}


REFUSED: Mapping[str, tuple[Case, str]] = {
    "split tokens": (
        (recipe("remembered by token"), "cp2", {}),
        "Remembered gives another gradient of scale where each rank has a part of the tokens; use dp2 or fsdp2",
    ),
    "experts": (
        (recipe("experts with one scale"), "ep2", {}),
        "has experts that share a parameter (0.scale), of which each rank would have another gradient; use dp2",
    ),
}


@pytest.fixture(scope="module")
def proofs() -> Mapping[str, Proof | str]:
    others = {f"refused: {name}": case for name, (case, _) in REFUSED.items()}
    others |= {f"not compared: {name}": case for name, case in NOT_COMPARED.items()}
    return prove({**FAST, **UNAWARE, **others}, steps=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAST)
def test_shared_parameters_take_the_step_of_one_process(proofs: Mapping[str, Proof | str], name: str) -> None:
    assert not same(proofs, [name])


@pytest.mark.slow
@pytest.mark.parametrize("name", UNAWARE)
def test_a_gradient_that_is_another_leaves_its_layers_whole(proofs: Mapping[str, Proof | str], name: str) -> None:
    assert not same(proofs, [name])


@pytest.mark.slow
@pytest.mark.parametrize("name", NOT_COMPARED)
def test_without_the_comparison_of_gradients_it_is_another_step(proofs: Mapping[str, Proof | str], name: str) -> None:
    proof = proofs[f"not compared: {name}"]
    assert isinstance(proof, Proof), proof
    assert not proof.same_step


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_what_ranks_would_train_otherwise_is_refused(proofs: Mapping[str, Proof | str], name: str) -> None:
    message = proofs[f"refused: {name}"]
    assert isinstance(message, str), message
    assert REFUSED[name][1] in message


@pytest.mark.slow
def test_a_training_with_shared_parameters_is_that_of_one_process(tmp_path: Path) -> None:
    """Losses of slices, trained and resumed, and those of one process that goes on from what slices saved."""
    double = recipe("gated", precision="fp64")
    alone, sliced = train_all(
        [job_of(double, layout, tmp_path / layout, checkpoint=Checkpointing(every=3)) for layout in ("single", "tp2")]
    )
    resumed = train_all(
        [
            job_of(double, target, tmp_path / source / target, checkpoint=Checkpointing(resume=_saved(result)))
            for source, target, result in (("tp2", "single", sliced), ("single", "tp2", alone))
        ]
    )
    assert largest_difference(sliced.losses, alone.losses) < 1e-9
    assert all(largest_difference(result.losses, alone.losses[3:]) < 1e-9 for result in resumed)


def _saved(result: samestep.TrainResult) -> str:
    return str(result.folder / "checkpoints" / "step-3")


def test_layers_left_whole_are_named_with_the_reason(capfd: pytest.CaptureFixture[str]) -> None:
    assert samestep.verify(recipe("in and out"), layout="tp2", threads=1, steps=1).same_step
    said = capfd.readouterr().err
    names = ", ".join(f"layers.*.attention.{name}" for name in ("q", "k", "v", "out"))
    assert f"every rank has all of {names}, since it uses layers.*.attention.scale on slices" in said


def test_a_plan_that_slices_what_must_stay_whole_is_refused() -> None:
    plan = {
        "layers.*.perceptron.gate": "column",
        "layers.*.perceptron.up": "column",
        "layers.*.perceptron.down": "row",
    }
    with pytest.raises(samestep.LayoutError) as error:
        samestep.verify(recipe("perceptron, in and out"), layout="tp2", threads=1, steps=1, tensor_plan=plan)
    assert "layers.0.perceptron.gate (Linear) can't be sliced, since it uses layers.*.perceptron.all" in str(
        error.value
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", ["tp2", "tp2 sequence=split"])
def test_every_net_takes_the_step_of_one_process(layout: str) -> None:
    every = {**cases({layout: tuple(NETS)}), "slices behind zeros": BEHIND_ZEROS, "slices": UNAWARE_SLICES}
    proofs = prove(every, steps=2)
    assert not same(proofs, [*every])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_slices_beside_other_axes_take_the_step_of_one_process() -> None:
    assert not same(prove(BESIDE, steps=2), list(BESIDE))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_transformers_that_hold_parameters_take_the_step_of_one_process() -> None:
    from holding_transformers import MODELS, Transformer

    every: dict[str, Case] = {
        name: (samestep.Recipe(task=Transformer(name=name), batch=7, clip=0.5, dropout=False), "tp2", {})
        for name in MODELS
    }
    assert not same(prove(every, steps=2), list(every))
