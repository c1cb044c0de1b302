"""The parameters after a method's first steps, in `compare`: right ones pass in each precision, wrong ones do not."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from small_tasks import Points

import samestep
from samestep.comparison.same_step import References, SameStep, short_job
from samestep.job import Job, Run
from samestep.launch.world import join
from samestep.layout import Layout
from samestep.tasks.registry import resolve
from samestep.training.fit import Training

RECIPE = samestep.Recipe(task=Points(), batch=32, epochs=2, optimizer=samestep.AdamW(lr=1e-2))
JOB = short_job(Job(recipe=RECIPE, run=Run(threads=1, device="cpu")), "fp64")
STEPS = 5


def weights(
    file: Path, precision: str, decay: float = 0.01, *, norms: list[float] | None = None, **other: Any
) -> Path:
    """What one process makes of the steps, in micro-batches; their gradient norms are added to `norms`."""
    optimizer = samestep.AdamW(lr=1e-2, weight_decay=decay, **other)
    run = replace(JOB.run, micro_batch=7)
    job = replace(JOB, recipe=replace(JOB.recipe, precision=precision, optimizer=optimizer), run=run)
    with join(alone=True, device="cpu", threads=1) as world:
        training = Training(job, resolve(job.recipe), world, Layout())
        for _, report in training.steps(stop=STEPS):
            if norms is not None:
                norms.append(report.grad_norm.item())
        save_file({name: value.contiguous() for name, value in training.session.trainer.state().items()}, file)
    return file


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    return References(JOB, resolve(JOB.recipe), STEPS, tmp_path_factory.mktemp("references"))


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
def test_right_parameters_pass(references: References, tmp_path: Path, precision: str) -> None:
    held = references.hold(weights(tmp_path / "model.safetensors", precision, 0.01), precision)
    assert held is not None
    assert held.worst < 0.3


@pytest.mark.parametrize(("precision", "decay"), [("fp64", 0.0101), ("fp32", 0.0), ("fp32", 0.1), ("bf16", 20.0)])
def test_another_decay_does_not(references: References, tmp_path: Path, precision: str, decay: float) -> None:
    held = references.hold(weights(tmp_path / "model.safetensors", precision, decay), precision)
    assert held is not None
    assert held.worst > 2
    assert held.parameter.endswith("weight")
    same = SameStep(precision=precision, losses=[1.0], reference=[1.0])
    assert same.same
    assert not replace(same, parameters=held).same


@pytest.mark.parametrize("changed", [{"decay_all": True}, {"eps": 1e-6}, {"betas": (0.9, 0.99)}], ids=str)
@pytest.mark.parametrize("precision", ["fp64", "fp32"])
def test_another_setting_does_not(
    references: References, tmp_path: Path, precision: str, changed: dict[str, Any]
) -> None:
    held = references.hold(weights(tmp_path / "model.safetensors", precision, **changed), precision)
    assert held is not None
    assert held.worst > 2


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
def test_summed_gradients_show_in_their_norms(references: References, tmp_path: Path, precision: str) -> None:
    """AdamW makes the same update of them."""
    norms: list[float] = []
    weights(tmp_path / "model.safetensors", precision, norms=norms)
    right = references.hold_norms(norms, precision)
    summed = references.hold_norms([2 * norm for norm in norms], precision)
    assert right is not None
    assert right.difference < 0.3 * right.tolerance
    assert summed is not None
    assert summed.difference > 2 * summed.tolerance
    same = SameStep(precision=precision, losses=[1.0], reference=[1.0], norms=right)
    assert same.same
    assert not replace(same, norms=summed).same
    assert references.hold_norms([None, *norms], precision) is None
    assert references.hold_norms([], precision) is None


def test_no_weights_are_not_held(references: References, tmp_path: Path) -> None:
    assert references.hold(tmp_path / "nothing.safetensors", "fp64") is None
    save_file({"other": torch.ones(1)}, tmp_path / "other.safetensors")
    assert references.hold(tmp_path / "other.safetensors", "fp64") is None


def test_values_that_are_no_numbers_are_not_the_same(references: References, tmp_path: Path) -> None:
    file = weights(tmp_path / "model.safetensors", "fp64", 0.01)
    with join(alone=True, device="cpu", threads=1) as world:
        training = Training(JOB, resolve(JOB.recipe), world, Layout())
        state = {name: torch.full_like(value, torch.nan) for name, value in training.session.trainer.state().items()}
    save_file(state, file)
    held = references.hold(file, "fp64")
    assert held is not None
    assert not held.same
    json = SameStep(precision="fp64", losses=[1.0], reference=[1.0], parameters=held).to_json()
    assert json["parameters"]["worst"] is None
    assert json["same_step"] is False
