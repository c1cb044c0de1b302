"""The step: one process and two take the one that a textbook's loop takes, with the messages and threads meant."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import plain_loop
import pytest
import torch
from safetensors.torch import load_file
from small_tasks import MeanLoss, NoWords, Points, Words
from torch import nn
from watching import Watching

import samestep
from samestep.training.evaluation import switch_off


def steps_of(result: samestep.TrainResult) -> list[dict[str, Any]]:
    lines = (result.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


RECIPES = {
    # 77 samples: the third batch of an epoch has 13, which two ranks share as 7 and 6.
    "adamw": samestep.Recipe(
        task=Points(samples=77),
        seed=3,
        batch=32,
        epochs=2,
        optimizer=samestep.AdamW(lr=0.05, betas=(0.8, 0.95), weight_decay=0.5),
        schedule=samestep.Schedule(warmup=0.4, decay="cosine", final=0.2),
        clip=0.4,
        precision="fp64",
    ),
    "sgd": samestep.Recipe(
        task=Points(samples=77),
        seed=4,
        batch=32,
        steps=7,
        optimizer=samestep.SGD(lr=0.2, momentum=0.9, nesterov=True, weight_decay=0.1),
        schedule=samestep.Schedule(warmup=3, decay="linear"),
        clip=50.0,
        precision="fp64",
    ),
    # 35 samples: the third batch has 3. One of two ranks has 2 of them, so in micro-batches of one sample the
    # other rank has nothing left for the second.
    "words": samestep.Recipe(
        task=Words(samples=35),
        seed=5,
        batch=16,
        epochs=2,
        optimizer=samestep.AdamW(lr=0.02, weight_decay=0.5, decay_all=True),
        precision="fp64",
    ),
}


@pytest.mark.parametrize(
    ("name", "layout", "micro_batch"),
    [
        *((name, "single", micro_batch) for name in RECIPES for micro_batch in (None, 8, 5)),
        pytest.param("adamw", "dp2", None, marks=pytest.mark.slow),
        ("sgd", "dp2", 4),
        ("words", "dp2", 1),
    ],
)
def test_a_step_is_that_of_a_plain_loop(tmp_path: Path, name: str, layout: str, micro_batch: int | None) -> None:
    recipe = RECIPES[name]
    result = samestep.train(
        recipe, layout=layout, micro_batch=micro_batch, folder=tmp_path, device="cpu", bind="none"
    )
    expected = plain_loop.train(recipe, recipe.task)
    assert result.losses == pytest.approx(expected.losses, rel=1e-11)
    steps = steps_of(result)
    assert [step["loss"] for step in steps] == pytest.approx(expected.losses, rel=1e-11)
    assert [step["grad_norm"] for step in steps] == pytest.approx(expected.grad_norms, rel=1e-10)
    assert [step["lr"] for step in steps] == pytest.approx(expected.rates, rel=1e-12)
    weights = load_file(result.model_file)
    assert weights.keys() == expected.weights.keys()
    for key, value in expected.weights.items():
        torch.testing.assert_close(weights[key], value, rtol=1e-9, atol=1e-11)


def test_the_recipes_clip_and_leave_alone() -> None:
    """The plain loop's norms say that one recipe is clipped, and the other not."""
    clipped, free = (plain_loop.train(RECIPES[name], RECIPES[name].task) for name in ("adamw", "sgd"))
    assert sum(norm > 0.4 for norm in clipped.grad_norms) >= 2
    assert max(free.grad_norms) < 50


@pytest.mark.parametrize(
    ("schedule", "fractions"),
    [
        (samestep.Schedule(), [1, 1, 1, 1, 1, 1]),
        (samestep.Schedule(warmup=0.5), [1 / 3, 2 / 3, 1, 1, 1, 1]),
        (samestep.Schedule(warmup=2, decay="linear"), [1 / 2, 1, 1, 3 / 4, 2 / 4, 1 / 4]),
        (samestep.Schedule(decay="linear", final=0.4), [1, 0.9, 0.8, 0.7, 0.6, 0.5]),
        (samestep.Schedule(warmup=3, decay="cosine"), [1 / 3, 2 / 3, 1, 1, 3 / 4, 1 / 4]),
    ],
)
def test_learning_rates_of_a_schedule(tmp_path: Path, schedule: samestep.Schedule, fractions: list[float]) -> None:
    recipe = samestep.Recipe(
        task=Points(samples=20), batch=10, steps=6, optimizer=samestep.AdamW(lr=0.01), schedule=schedule
    )
    rates = [step["lr"] for step in steps_of(samestep.train(recipe, folder=tmp_path, device="cpu"))]
    assert rates == pytest.approx([0.01 * fraction for fraction in fractions], rel=1e-12)


@dataclass(frozen=True, kw_only=True)
class Watched:
    """A training on two ranks under the watching engine."""

    result: samestep.TrainResult
    seen: Path

    def text(self, name: str) -> str:
        return (self.seen / name).read_text(encoding="utf-8")

    @property
    def threads(self) -> list[str]:
        return [self.text(f"threads-{rank}") for rank in (0, 1)]

    @property
    def messages(self) -> list[int]:
        """How often each rank sent gradients. The model is small enough for one message to hold all of them."""
        return [len(self.text(f"messages-{rank}")) for rank in (0, 1)]


STEPS = 5


def watch(folder: Path, layout: str = "dp2", *, seed: int = 0, **run: Any) -> Watched:
    recipe = samestep.Recipe(task=Points(), seed=seed, batch=32, steps=STEPS)
    engine = Watching(folder / "seen")
    # Ranks would be bound to cores that the machine only seems to have.
    run = {"bind": "none", **run}
    result = samestep.train(recipe, layout=layout, engine=engine, folder=folder / "run", device="cpu", **run)
    return Watched(result=result, seen=engine.folder)


@pytest.fixture(scope="module")
def six_cores() -> Iterator[None]:
    """A machine of six cores, and a user who asked for no number of threads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)), raising=False)
        patch.delenv("OMP_NUM_THREADS", raising=False)
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, six_cores: None) -> Watched:
    """Every rank's samples in one forward."""
    return watch(tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def in_four(tmp_path_factory: pytest.TempPathFactory, six_cores: None) -> Watched:
    """Every rank's 16 samples in four micro-batches."""
    return watch(tmp_path_factory.mktemp("in_four"), micro_batch=4, threads=2)


def test_gradients_are_sent_once_a_step_however_many_micro_batches(whole: Watched, in_four: Watched) -> None:
    assert whole.messages == [STEPS, STEPS]
    assert in_four.messages == [STEPS, STEPS]
    assert in_four.result.losses == pytest.approx(whole.result.losses, rel=1e-5)


def test_ranks_share_the_cores_unless_told_otherwise(whole: Watched, in_four: Watched) -> None:
    assert whole.threads == ["3", "3"]
    assert in_four.threads == ["2", "2"]
    reports = [json.loads((run.result.folder / "report.json").read_text("utf-8")) for run in (whole, in_four)]
    assert [report["threads"] for report in reports] == [3, 2]


def test_first_weights_are_the_seeds_on_every_rank(tmp_path: Path, whole: Watched) -> None:
    torch.manual_seed(0)
    expected = Points().model().state_dict()
    again = [watch(tmp_path / name, "single", seed=seed) for name, seed in (("a", 0), ("b", 0), ("c", 1))]
    found = [load_file(whole.seen / f"weights-{rank}.safetensors") for rank in (0, 1)]
    found += [load_file(run.seen / "weights-0.safetensors") for run in again]
    *same, other = found
    for weights in same:
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[name], value) for name, value in expected.items())
    assert not torch.equal(other["0.weight"], expected["0.weight"])


def test_float32_stays_near_float64(tmp_path: Path) -> None:
    recipe = replace(RECIPES["adamw"], precision="fp32")
    result = samestep.train(recipe, folder=tmp_path, micro_batch=8, device="cpu")
    assert result.losses == pytest.approx(plain_loop.train(recipe, recipe.task).losses, rel=1e-4)
    assert {value.dtype for value in load_file(result.model_file).values()} == {torch.float32}


def test_bfloat16_computes_in_bfloat16_and_keeps_parameters_in_float32(tmp_path: Path) -> None:
    recipe = samestep.Recipe(task=Points(), batch=32, steps=20, optimizer=samestep.AdamW(lr=0.02), precision="bf16")
    result = samestep.train(recipe, folder=tmp_path, device="cpu")
    expected = plain_loop.train(recipe, recipe.task).losses
    assert result.losses == pytest.approx(expected, rel=0.03)
    assert result.losses != pytest.approx(expected, rel=1e-5)  # else nothing was computed in bfloat16
    assert result.losses[-1] < 0.8 * result.losses[0]
    assert {value.dtype for value in load_file(result.model_file).values()} == {torch.float32}


def test_float16_without_an_accelerator_is_refused_before_any_process_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*arguments: Any, **options: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr("samestep.launch.local.start", start)
    monkeypatch.setattr("samestep.launch.local.train", start)
    recipe = samestep.Recipe(task=Points(), batch=32, steps=2, precision="fp16")
    with pytest.raises(samestep.UserError, match=r"recipe\.precision is fp16, .*; use bf16 or fp32 on a CPU"):
        samestep.train(recipe, layout="dp2", folder=tmp_path, device="cpu")


def test_a_recipe_without_dropout_trains_as_a_model_without_dropout(tmp_path: Path) -> None:
    recipes = {
        "without": samestep.Recipe(task=Points(dropout=0.0), batch=32, steps=4),
        "off": samestep.Recipe(task=Points(dropout=0.5), batch=32, steps=4, dropout=False),
        "on": samestep.Recipe(task=Points(dropout=0.5), batch=32, steps=4),
    }
    losses = {
        name: samestep.train(recipe, folder=tmp_path / name, device="cpu").losses for name, recipe in recipes.items()
    }
    assert losses["off"] == losses["without"]
    assert losses["on"] != losses["without"]


class WithConfig(nn.Module):
    """Keeps its dropout in a configuration of its own kind, as functional dropout wants it."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        rate = self.config["dropout"] if isinstance(self.config, dict) else self.config.dropout
        return nn.functional.dropout(inputs, rate, self.training)


@dataclass(frozen=True)
class FrozenConfig:
    dropout: float = 0.5


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.attention(inputs, inputs, inputs, need_weights=False)[0]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(8, 8, num_layers=2, dropout=0.5, batch_first=True)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.recurrent(inputs)[0]


class SmallBert(nn.Module):
    def __init__(self, attention: str) -> None:
        from transformers import BertConfig, BertForSequenceClassification

        super().__init__()
        config = BertConfig(
            vocab_size=20,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=16,
            hidden_dropout_prob=0.4,
            attention_probs_dropout_prob=0.4,
        )
        config._attn_implementation = attention
        self.bert = BertForSequenceClassification(config)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.bert(input_ids=inputs[..., 0].sigmoid().mul(20).long().clamp(max=19)).logits


MODELS = {
    "modules": lambda: nn.Sequential(nn.Dropout(0.5), nn.Dropout1d(0.5), nn.AlphaDropout(0.5)),
    "attention": Attention,
    "recurrent": Recurrent,
    "dictionary": lambda: WithConfig({"dropout": 0.5}),
    "frozen configuration": lambda: WithConfig(FrozenConfig()),
    "BERT, attention by torch": lambda: SmallBert("sdpa"),
    "BERT, attention by hand": lambda: SmallBert("eager"),
}


@pytest.mark.parametrize("name", MODELS)
def test_dropout_is_switched_off(name: str) -> None:
    model = MODELS[name]().train()
    inputs = torch.randn(4, 6, 8)
    assert not torch.equal(model(inputs), model(inputs))
    switch_off(model)
    assert torch.equal(model(inputs), model(inputs))
    assert model.training


def test_a_configuration_that_a_task_keeps_keeps_its_dropout() -> None:
    """A proof must not take the dropout away from the training that follows it."""
    kept = {"dropout": 0.5}
    first, second = WithConfig(kept), WithConfig(kept)
    switch_off(nn.Sequential(first, second))
    assert kept == {"dropout": 0.5}
    assert first.config == {"dropout": 0.0}
    assert first.config is second.config


def test_a_loss_that_is_a_mean_alone_is_refused(tmp_path: Path) -> None:
    with pytest.raises(samestep.UserError, match="the loss gave a Tensor alone; it must give a pair"):
        samestep.train(samestep.Recipe(task=MeanLoss(), batch=16, steps=2), folder=tmp_path)


def test_a_batch_without_a_term_does_no_harm(tmp_path: Path) -> None:
    result = samestep.train(samestep.Recipe(task=NoWords(), batch=16, steps=2), folder=tmp_path, check=False)
    assert result.losses == (0.0, 0.0)
    assert all(torch.isfinite(value).all() for value in load_file(result.model_file).values())
