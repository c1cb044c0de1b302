"""`recipe.master_weights`: bf16 parameters whose optimizer steps a float32 copy: numbers, bytes, checkpoints."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from small_tasks import Points
from torch import Tensor, nn
from turn_tasks import Gan, Unlike

import samestep
from samestep import api
from samestep.errors import LayoutError, UserError
from samestep.job import Checkpointing, Job, Run
from samestep.launch.world import join
from samestep.layout import Layout
from samestep.training.fit import Training
from samestep.training.usage import Usage

SLOW = pytest.mark.slow
WIDTH, LAYERS = 32, 64
PARAMETERS = LAYERS * WIDTH * WIDTH


class Layers(Points):
    """Many square layers, so that those that are gathered at a time are few of all."""

    def model(self) -> nn.Module:
        return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()) for _ in range(LAYERS)))

    def train_set(self) -> samestep.Samples:
        vectors = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(0))
        return [(vector, vector) for vector in vectors]

    def loss(self, output: Tensor, batch: samestep.Batch) -> tuple[Tensor, Tensor | int]:
        return (output.float() - batch.targets).square().sum(), len(output)


def recipe(task: Any = None, **settings: Any) -> samestep.Recipe:
    given = {"batch": 16, "steps": 4, "precision": "bf16", "master_weights": True, **settings}
    return samestep.Recipe(task=task or Points(), **given)


def test_the_steps_are_those_of_a_float32_copy_with_gradients_of_rounded_parameters() -> None:
    task = Points()
    asked = recipe(task, clip=None)
    job = Job(recipe=asked, run=Run())
    with join(alone=True, threads=1) as world:
        training = Training(job, task, world, Layout())
        model: Any = training.session.trainer.model  # pyright: ignore[reportAttributeAccessIssue]
        own = task.model()
        masters = [parameter.detach().float().clone().requires_grad_() for parameter in model.parameters()]
        decays = [each for each in masters if each.ndim > 1]
        rest = [each for each in masters if each.ndim <= 1]
        groups = [{"params": decays, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=3e-4)
        own.to(torch.bfloat16)
        for batch, _ in training.steps():
            with torch.no_grad():
                for mine, master in zip(own.parameters(), masters, strict=True):
                    mine.copy_(master)
                    mine.grad = None
            (micro_batch,) = batch.micro_batches
            with torch.autocast("cpu", torch.bfloat16):
                loss, _ = task.loss(own(micro_batch.batch.inputs), micro_batch.batch)
            (loss / batch.global_samples).backward()
            for mine, master in zip(own.parameters(), masters, strict=True):
                assert mine.grad is not None
                master.grad = mine.grad.float()
            optimizer.step()
        for parameter, master in zip(model.parameters(), masters, strict=True):
            assert parameter.dtype == torch.bfloat16
            torch.testing.assert_close(parameter, master.detach().bfloat16(), rtol=0, atol=0)


@pytest.mark.parametrize("layouts", [("zero1x2", "fsdp2"), pytest.param(("dp2", "zero2x2", "tp2"), marks=SLOW)])
def test_every_way_to_share_the_state_out_takes_the_same_step_in_float64(layouts: Sequence[str]) -> None:
    job = Job(recipe=recipe(Points(), batch=12), run=Run(threads=1, check=False))
    rows = api.verify_layouts(job, list(layouts), steps=3)
    assert {row.layout: row.verdict for row in rows} == dict.fromkeys([row.layout for row in rows], "same")


FORMULAS = {"dp2": 16.0, "zero1x2": 4 + 12 / 2, "zero2x2": 2 + 14 / 2, "fsdp2": 16 / 2}


@pytest.mark.parametrize("layouts", [("zero1x2", "fsdp2"), pytest.param(("dp2", "zero2x2"), marks=SLOW)])
def test_bytes_a_parameter_follow_the_zero_paper_within_three_percent(layouts: Sequence[str]) -> None:
    held = api.dry_run_layouts(Job(recipe=recipe(Layers()), run=Run(threads=1, check=False)), list(layouts))
    for layout in layouts:
        for rank in held[layout]:
            assert isinstance(rank, Usage), held[layout]
            # A rank may own a layer more than another.
            whole = rank.parameters + rank.optimizer_state + rank.gathered_and_gradients
            assert whole / PARAMETERS == pytest.approx(FORMULAS[layout], rel=0.03), layout


def trained(layout: str, folder: Path, **run: Any) -> tuple[Mapping[str, Any], tuple[float, ...]]:
    result = samestep.train(recipe(steps=8), layout, folder=folder, threads=1, check=False, log=(), **run)
    return result.metrics, result.losses


@pytest.mark.parametrize("layout", [pytest.param("dp2", marks=SLOW), "fsdp2"])
def test_layouts_differ_by_the_rounding_of_bf16_alone(layout: str, tmp_path: Path) -> None:
    _, alone = trained("single", tmp_path / "single")
    _, losses = trained(layout, tmp_path / layout)
    assert losses == pytest.approx(alone, rel=0.01)


@pytest.mark.parametrize("other", ["single", pytest.param("zero1x2", marks=SLOW), "fsdp2"])
def test_a_checkpoint_holds_the_copies_whole_and_loads_under_another_layout(other: str, tmp_path: Path) -> None:
    saving = Checkpointing(every=4, folder=tmp_path / "checkpoints")
    _, whole = trained("single", tmp_path / "one", checkpoint=saving)
    resumed = Checkpointing(every=100, folder=tmp_path / "more", resume=str(tmp_path / "checkpoints" / "step-4"))
    _, losses = trained(other, tmp_path / "two", checkpoint=resumed)
    if other == "single":
        assert losses[-4:] == whole[-4:]  # to the bit: rounded copies would give others
    assert losses[-4:] == pytest.approx(whole[-4:], rel=0.01)


@pytest.mark.parametrize(
    ("settings", "run", "error", "words"),
    [
        ({}, {"engine": "accelerate"}, UserError, 'engine "accelerate" does not have'),
        ({}, {"layout": "single offload=optimizer"}, LayoutError, "leave offload=optimizer out"),
        ({"average": samestep.Average()}, {}, UserError, "recipe.average is given"),
        (
            {"groups": ({"parameters": "0.*", "optimizer": {"name": "sgd"}},)},
            {},
            UserError,
            r"recipe\.groups\.0\.optimizer is another one .* give the group lr, weight_decay or schedule in",
        ),
        (
            {"groups": ({"parameters": "0.*", "optimizer": {"name": "torch.optim.Adamax"}},)},
            {},
            UserError,
            r"and recipe\.groups\.0\.optimizer is torch\.optim\.Adamax; use one of them",
        ),
        (
            {"optimizer": {"name": "torch.optim.Adamax"}},
            {},
            UserError,
            r"and recipe\.optimizer is torch\.optim\.Adamax; use one of them",
        ),
        (
            {"task": Unlike(samestep.SGD(lr=0.1), None)},
            {},
            UserError,
            r"turn discriminator: optimizer is sgd and recipe\.optimizer is adamw; use one kind for all",
        ),
        (
            {"task": Unlike(samestep.AdamW(state="bf16"), None)},
            {},
            UserError,
            r"turn discriminator: optimizer\.state is bf16; keep the state full",
        ),
    ],
)
def test_what_it_does_not_go_with_is_refused_before_a_run_is_replaced(
    settings: dict[str, Any], run: dict[str, Any], error: type[Exception], words: str, tmp_path: Path
) -> None:
    report = tmp_path / "report.json"  # of an earlier run
    report.write_text("{}", encoding="utf-8")
    with pytest.raises(error, match=words):
        samestep.train(
            recipe(**settings),
            **{"layout": "single", "check": False, "folder": tmp_path, "overwrite": True, **run},
        )
    assert report.exists()


@pytest.mark.parametrize(
    "settings",
    [
        {"groups": ({"parameters": "0.*", "lr": 0.1},)},
        {"groups": ({"parameters": "0.*", "lr": 0.1, "optimizer": {"name": "adamw"}},)},
        {"task": Gan()},
    ],
)
def test_what_a_refusal_recommends_can_be_had(settings: dict[str, Any], tmp_path: Path) -> None:
    assert samestep.train(recipe(**settings), folder=tmp_path, log=(), check=False, threads=1).steps == 4


def test_parameters_of_more_digits_need_no_copy() -> None:
    with pytest.raises(samestep.UserError, match="precision is fp32; use bf16"):
        recipe(precision="fp32")
