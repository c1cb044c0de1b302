"""DeepSpeed's pipeline: the step of one process for an nn.Sequential, and a reason for every other model."""

import importlib.util
import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from proving import prove, same
from safetensors.torch import load_file
from small_tasks import Counted, Points, Words
from torch import Tensor, nn

import samestep
from samestep.launch import local
from samestep.launch.world import join

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="pip install 'samestep[deepspeed]'"
)

ENGINE: dict[str, Any] = {"engine": "deepspeed"}


def recipe(task: samestep.Task, **values: Any) -> samestep.Recipe:
    # Momentum takes a gradient as it is clipped, which Adam would nearly undo.
    settings: dict[str, Any] = {
        "batch": 33,  # uneven over stages' micro-batches, and 200 samples are no multiple of it
        "steps": 8,
        "clip": 0.5,
        "optimizer": samestep.SGD(lr=0.1, momentum=0.9),
        "schedule": samestep.Schedule(warmup=2, decay="cosine"),
    }
    return samestep.Recipe(task=task, **{**settings, **values})


class Both(nn.Module):
    """Gives two tensors, or takes two."""

    def __init__(self, inner: nn.Module, *, gives: bool) -> None:
        super().__init__()
        self.inner, self.gives = inner, gives

    def forward(self, given: Any) -> Any:
        if self.gives:
            return self.inner(given), given.flip(1)
        first, second = given
        return self.inner(torch.cat([first, second.sin()], dim=1))


class Nested(Words):
    """Layers with names, in sequences within the sequence; a tuple goes from one to the other. A bias is frozen."""

    def model(self) -> nn.Module:
        inner = nn.Sequential(nn.Linear(4, 9), nn.ReLU(inplace=True), Both(nn.Linear(9, 7), gives=True))
        outer = nn.Sequential(Both(nn.Linear(16, 12), gives=False), nn.Dropout(0.2), nn.GELU())
        head = nn.Linear(12, self.classes)
        head.bias.requires_grad_(False)
        return nn.Sequential(OrderedDict(body=inner, more=outer, norm=nn.LayerNorm(12), head=head))


class Four(Points):
    """Four layers with parameters."""

    def model(self) -> nn.Module:
        act = nn.Tanh()  # at two places
        layers = [nn.Linear(4, 7), act, nn.Linear(7, 7), act, nn.Linear(7, 7), nn.Linear(7, self.classes)]
        return nn.Sequential(*layers)


@pytest.mark.slow
def test_two_stages_take_the_step_of_one_process(tmp_path: Path) -> None:
    config = tmp_path / "ds_config.json"
    optimizer = {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}}
    config.write_text(
        json.dumps({"zero_optimization": {"stage": 1}, "gradient_clipping": 0.5, "optimizer": optimizer}),
        encoding="utf-8",
    )
    mirrored = samestep.SGD(lr=0.05, momentum=0.9, decay_all=True)
    words = recipe(Words(), batch=13)
    cases: dict[str, Any] = {
        # The count of terms is known after all forwards; and the last micro-batch has fewer samples.
        "words": (words, "pp2", {**ENGINE, "micro_batch": 3}),
        "tuples": (recipe(Nested()), "pp2", ENGINE),
        "configured": (recipe(Words(), optimizer=mirrored), "pp2", {**ENGINE, "engine_config": config}),
        # What a pipeline leaves in the package must not change what comes after it.
        "replicas after it": (words, "dp2", ENGINE),
    }
    counted = {
        "a stage that counts its forwards": (recipe(Counted()), "pp2", {**ENGINE, "micro_batch": 11}),
        "a replica that counts its forwards": (recipe(Counted()), "dp2", {**ENGINE, "micro_batch": 11}),
    }
    found = prove({**cases, **counted})
    assert same(found, list(cases)) == {}
    for name in counted:
        assert "the buffer 1.calls is moved on by every training forward" in str(found[name]), name


@pytest.mark.slow
def test_four_ranks_take_the_step_of_one_process() -> None:
    words = recipe(Words(), batch=13)
    cases: dict[str, Any] = {
        layout: (words, layout, ENGINE) for layout in ("pp2 zero1x2", "pp2 dp2 order=dp.pp.fsdp.cp.tp")
    }
    cases["pp4"] = (recipe(Four()), "pp4", ENGINE)
    cases["mostly zero weight"] = (recipe(Words(), batch=3), "pp2 dp2", ENGINE)
    assert same(prove(cases), list(cases)) == {}


@pytest.mark.slow
def test_a_run_gives_what_one_process_gives(tmp_path: Path) -> None:
    board = {"enabled": True, "output_path": str(tmp_path / "board"), "job_name": "points"}
    config = tmp_path / "ds_config.json"
    config.write_text(json.dumps({"tensorboard": board, "steps_per_print": 1}), encoding="utf-8")
    asked = recipe(Points(dropout=0.2))
    run: dict[str, Any] = {"device": "cpu", "log": ()}
    alone = samestep.train(asked, folder=tmp_path / "alone", **run)
    both = samestep.train(asked, "pp2", folder=tmp_path / "both", engine_config=config, threads=1, **ENGINE, **run)
    assert both.losses == pytest.approx(alone.losses, rel=1e-4)
    assert both.metrics == alone.metrics
    weights, expected = load_file(both.model_file), load_file(alone.model_file)
    assert weights.keys() == expected.keys()
    assert all(torch.allclose(weights[name], expected[name], atol=1e-5) for name in expected)
    assert [rank.parameters for rank in both.usage] == [4 * 80, 4 * (32 + 51)]
    assert any((tmp_path / "board").rglob("events.out.tfevents*"))


def steps(folder: str, *, again: bool) -> list[float]:
    """Losses of steps 3 to 5, without a stop or from the checkpoint after step 2."""
    task, losses = Points(), list[float]()
    with samestep.session("pp2", engine="deepspeed", device="cpu", threads=1) as session:
        torch.manual_seed(int(again))
        model = task.model()
        session.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.05))
        trainer: Any = session.trainer
        if again:
            assert trainer.load_checkpoint(folder, trusted=True)["seen"] == 99
        for batch in session.batches(task.train_set(), batch=33, collate=task.collate, steps=6, start=3 * again):
            losses.append(session.step(batch, task.loss).loss.item())
            if batch.step == 2:
                trainer.save_checkpoint(folder, client_state={"seen": 99})
    return losses[-3:]


def around_a_checkpoint(folder: str) -> list[list[float]]:
    with join(device="cpu", threads=1):
        return [steps(folder, again=again) for again in (False, True)]


@pytest.mark.slow
def test_a_checkpoint_goes_on_where_it_was(tmp_path: Path) -> None:
    losses, resumed = local.start(around_a_checkpoint, (str(tmp_path),), 2)
    assert resumed == pytest.approx(losses, rel=1e-6)


class Wrong(Points):
    """A model that the pipeline can't take."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def model(self) -> nn.Module:
        first, second = nn.Linear(4, 4), nn.Linear(4, self.classes)
        return {
            "linear": lambda: second,
            "function": lambda: Doubling(first, second),
            "few": lambda: nn.Sequential(nn.ReLU(), second, nn.ReLU()),
            "twice": lambda: nn.Sequential(first, nn.ReLU(), first, second),
            "tied": lambda: _tied(first, nn.Linear(4, 4), second),
            "dropout": lambda: (lambda drop: nn.Sequential(first, drop, nn.Linear(4, 4), drop, second))(
                nn.Dropout(0.1)
            ),
            "more": lambda: Scaled(first, second),
        }[self.kind]()


class Doubling(nn.Sequential):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class Scaled(nn.Sequential):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.scale = nn.Parameter(torch.ones(()))


def _tied(first: nn.Linear, *others: nn.Linear) -> nn.Module:
    others[0].weight = first.weight
    return nn.Sequential(first, *others)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("linear", "pipeline for models that are an nn.Sequential, .* this one is a Linear; use engine native"),
        ("function", "this one is a Doubling"),
        ("few", "2 pipeline stages for 1 layers with parameters to train; use a layout without pp"),
        ("twice", "layers 0 and 2 are one, or share a tensor"),
        ("tied", "layers 0 and 1 are one, or share a tensor"),
        ("dropout", "layers 1 and 3 are one, or share a tensor"),
        ("more", "scale belongs to no layer"),
    ],
)
def test_models_that_it_cannot_take_are_refused(kind: str, message: str) -> None:
    with pytest.raises(samestep.UserError, match=message):
        samestep.train(recipe(Wrong(kind)), "pp2", **ENGINE)


class Pairs(Points):
    """Called with two tensors."""

    def collate(self, samples: Any) -> samestep.Batch:
        points, labels = super().collate(samples)
        return samestep.Batch((points, points), labels)


@pytest.mark.parametrize(
    ("layout", "run", "message"),
    [
        ("pp2 fsdp2", {}, 'goes with ZeRO 1 alone, .*; use "pp2 zero1x2"'),
        ("pp2 schedule=gpipe", {}, 'one schedule, 1f1b, of one stage a rank; use "pp2", or engine native'),
        ("pp2 balance=memory", {}, 'by the number of parameters alone; use "pp2"'),
        ("pp2 zero1x2 offload=optimizer", {}, 'no offload in a pipeline; use "pp2 zero1x2"'),
        ("pp2", {"cut_at": ("4",)}, "cuts by the number of parameters; use no cut_at"),
        ("pp2", {"micro_batch": 33}, "fewer than the 2 pipeline ranks"),
    ],
)
def test_layouts_that_it_does_not_have_are_refused(layout: str, run: dict[str, Any], message: str) -> None:
    with pytest.raises(samestep.UserError, match=message):
        samestep.train(recipe(Points()), layout, **ENGINE, **run)


def test_precisions_and_inputs_that_it_does_not_have_are_refused(tmp_path: Path) -> None:
    with pytest.raises(samestep.UserError, match=r"recipe.precision is bf16, .* fp32"):
        samestep.train(recipe(Points(), precision="bf16"), "pp2", **ENGINE)
    with pytest.raises(samestep.UserError, match="with one tensor, and a batch's inputs are a tuple"):
        samestep.train(recipe(Pairs()), "pp2", **ENGINE)
    config = tmp_path / "ds_config.json"
    for section, message in (
        ({"pipeline": {"activation_checkpoint_interval": 1}}, "activation_checkpoint_interval 1"),
        ({"zero_optimization": {"stage": 2}}, "goes with ZeRO 1 alone"),
    ):
        config.write_text(json.dumps(section), encoding="utf-8")
        with pytest.raises(samestep.UserError, match=message):
            samestep.train(recipe(Points()), "pp2", engine_config=config, **ENGINE)
