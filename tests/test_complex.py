"""Complex parameters stay complex: in a step, under every layout that takes them, in checkpoints and in weights."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from casting_tasks import AllComplex, Filters
from proving import Case, prove, same
from safetensors.torch import load_file
from torch import nn

import samestep
from samestep.data.loader import to_device
from samestep.data.order import SampleOrder
from samestep.parallel.complex_parameters import check_complex
from samestep.parallel.deferred_init import move


def recipe(task: samestep.Task, **values: Any) -> samestep.Recipe:
    settings = {"batch": 10, "steps": 4, "clip": 0.5, "optimizer": samestep.AdamW(lr=1e-2)}
    return samestep.Recipe(task=task, **{**settings, **values})


def test_moving_keeps_what_is_complex() -> None:
    model = nn.ParameterList([torch.ones(2) * 1j, torch.ones(2)])
    model.register_buffer("turn", torch.ones(2) * 2j)
    model.register_buffer("count", torch.ones(2, dtype=torch.int64))
    move(model, torch.device("cpu"), torch.float64)
    kinds = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    assert kinds == {"0": torch.complex128, "1": torch.float64, "turn": torch.complex128, "count": torch.int64}
    assert model.get_parameter("0").imag.tolist() == [1, 1]
    moved = to_device([torch.ones(2) * 1j, torch.ones(2), "word"], torch.device("cpu"), torch.float64)
    assert moved[0].tolist() == [1j, 1j]
    assert [each.dtype for each in moved[:2]] == [torch.complex128, torch.float64]


LAYOUTS = (
    "dp2",
    "zero1x2",
    "zero1x2 offload=optimizer",
    "dp2 recompute=full",
    "dp2 offload=activations",
    "pp2",
    "zero1x2 pp2",
)


FAST = (
    *(f"filters {layout}" for layout in ("dp2", "zero1x2", "pp2", "fsdp2", "zero2x2")),
    *("complex dp2", "complex tp2"),
)


def cases() -> dict[str, Case]:
    filters, complex_all_through = recipe(Filters()), recipe(AllComplex())
    of_two = {f"filters {layout}": (filters, layout, {"micro_batch": 3}) for layout in LAYOUTS[:-1]}
    of_two |= {f"complex {layout}": (complex_all_through, layout, {}) for layout in ("dp2", "zero1x2", "pp2", "tp2")}
    return {**of_two, "filters fsdp2": (filters, "fsdp2", {}), "filters zero2x2": (filters, "zero2x2", {})}


def test_layouts_take_the_same_step_of_complex_parameters_or_say_why_not() -> None:
    proofs = prove({name: case for name, case in cases().items() if name in FAST})
    wrong = same(proofs, list(proofs))
    assert set(wrong) == {"filters fsdp2", "filters zero2x2"}
    assert "the parameter 2.filter is complex, and shards of complex" in wrong["filters fsdp2"]
    assert wrong["filters zero2x2"].endswith("use dp2 or zero1x2")


@pytest.mark.slow
def test_more_layouts_take_the_same_step_of_complex_parameters() -> None:
    proofs = prove({name: case for name, case in cases().items() if name not in FAST})
    assert same(proofs, list(proofs)) == {}


def plain_training(given: samestep.Recipe, task: samestep.Task) -> tuple[list[float], dict[str, Any]]:
    """One process, the whole batch at once, in float64 and complex128: PyTorch alone, with its own AdamW."""
    torch.manual_seed(given.seed)
    model = task.model()
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.to(torch.complex128 if tensor.is_complex() else torch.float64)
    decaying = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    others = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [{"params": decaying, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=given.optimizer.betas)  # pyright: ignore
    samples, losses = task.train_set(), []
    order = SampleOrder(size=len(samples), batch=given.batch, seed=given.seed)
    for step in range(given.steps or 0):
        points, labels = task.collate([samples[index] for index in order.global_batch(step).tolist()])
        total, count = task.loss(model(points.double()), samestep.Batch(points, labels))
        optimizer.zero_grad()
        (total / count).backward()
        # The norm by its formula: complex numbers count by their magnitude.
        norm = math.sqrt(sum((p.grad.abs() ** 2).sum().item() for p in model.parameters() if p.grad is not None))
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad *= min(1.0, 0.5 / norm)
        optimizer.step()
        losses.append((total / count).item())
    return losses, model.state_dict()


@pytest.mark.slow
def test_a_training_is_that_of_plain_pytorch_and_another_layout_goes_on_from_it(tmp_path: Path) -> None:
    given = recipe(Filters(), optimizer=samestep.AdamW(lr=1e-2, weight_decay=0.01))
    losses, weights = plain_training(given, Filters())
    saving = samestep.Checkpointing(every=2)
    result = samestep.train(given, layout="dp2", threads=1, folder=tmp_path / "dp2", checkpoint=saving)
    assert result.losses == pytest.approx(losses, rel=1e-5)
    saved = load_file(result.model_file)
    assert saved["2.filter"].dtype == saved["2.phase"].dtype == torch.complex64
    for name, value in weights.items():
        torch.testing.assert_close(saved[name].to(value.dtype), value, rtol=1e-4, atol=1e-5)
    start = samestep.Checkpointing(resume=str(result.folder / "checkpoints" / "step-2"))
    for layout in ("single", "zero1x2"):
        gone_on = samestep.train(given, layout=layout, threads=1, folder=tmp_path / layout, checkpoint=start)
        assert gone_on.losses == pytest.approx(result.losses[2:], rel=1e-6)


def test_what_would_lose_the_imaginary_part_is_refused(tmp_path: Path) -> None:
    with pytest.raises(samestep.UserError, match=r"fp64 and 2\.filter of the model is complex, .* use fp32"):
        samestep.train(recipe(Filters(), precision="fp64"), folder=tmp_path / "run")
    with pytest.raises(samestep.UserError, match=r"fp16 and the parameter 2\.filter is complex, .* use bf16 or fp32"):
        check_complex(Filters().model(), samestep.Layout(), "fp16")
    with pytest.raises(samestep.UserError, match=r'engine "accelerate": .* 2\.filter is complex; use engine native'):
        samestep.train(recipe(Filters()), engine="accelerate", folder=tmp_path / "run")


def test_a_training_in_bf16_keeps_complex64(tmp_path: Path) -> None:
    result = samestep.train(recipe(Filters(), precision="bf16"), threads=1, folder=tmp_path / "run")
    saved = load_file(result.model_file)
    assert saved["2.filter"].dtype == torch.complex64
    assert (saved["2.filter"].imag != 0).all()
