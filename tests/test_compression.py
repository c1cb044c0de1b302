"""`recipe.communication`: every method beside a plain loop over simulated ranks, bytes, checkpoints, mistakes."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from resuming import job_of, train_all
from safetensors.torch import load_file
from simulated_replicas import (
    OPTIMIZER,
    Simulation,
    apart,
    begin_diloco,
    diloco,
    half,
    local_sgd,
    resized,
)
from small_tasks import Words

import samestep
from samestep.errors import UserError
from samestep.validation import checked

BATCH, SAMPLES, STEPS, SAVED, CLIP = 10, 45, 12, 7, 0.5
TENSORS = {"0.weight": 64, "0.bias": 16, "1.weight": 16, "1.bias": 16, "4.weight": 48, "4.bias": 3}
NUMBERS = sum(TENSORS.values())
HALVES = (["0.weight", "0.bias", "1.weight"], ["1.bias", "4.weight", "4.bias"])

METHODS: Mapping[str, dict[str, Any]] = {
    "bf16": {"kind": "bf16"},
    "fp16": {"kind": "fp16"},
    "local-sgd": {"kind": "local-sgd", "every": 3, "start": 2},
    "diloco": {"kind": "diloco", "every": 4, "outer_lr": 0.6, "outer_momentum": 0.8},
    "streaming": {"kind": "diloco", "every": 4, "fragments": 2, "overlap": 2, "mixing": 0.25},
}
SIMULATED: Mapping[str, Any] = {
    "bf16": half(torch.bfloat16),
    "fp16": half(torch.float16),
    "local-sgd": local_sgd(every=3, start=2),
    "diloco": diloco(every=4, lr=0.6, momentum=0.8, parts=[list(TENSORS)]),
    "streaming": diloco(every=4, lr=0.7, momentum=0.9, parts=HALVES, overlap=2, mixing=0.25),
}
# 16 bits round in another order where a number of ranks sums otherwise than 0 + 1.
CLOSE = 1e-9


def task() -> samestep.Task:
    return Words(samples=SAMPLES)


def recipe(communication: dict[str, Any] | None, **more: Any) -> samestep.Recipe:
    values = {
        "task": task(),
        "batch": BATCH,
        "steps": STEPS,
        "precision": "fp64",
        "clip": CLIP,
        "optimizer": OPTIMIZER,
        "communication": communication,
        **more,
    }
    return checked(samestep.Recipe, values, prefix=("recipe",))


def simulated(name: str) -> Simulation:
    run = Simulation(task(), ranks=2, batch=BATCH, clip=CLIP)
    begin_diloco(run)
    return run


def checkpoint_of(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step-{step:08d}"


def sent(folder: Path) -> list[int]:
    return [json.loads(line)["sent_bytes"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compression")


@pytest.fixture(scope="module")
def trained(folder: Path) -> Mapping[str, samestep.TrainResult]:
    """Every method on two ranks, in one start of them; saved after step 7, in the middle of every round."""
    jobs = [
        job_of(recipe(method), "dp2", folder / name, checkpoint={"every": SAVED, "keep": 9})
        for name, method in METHODS.items()
    ]
    return dict(zip(METHODS, train_all(jobs), strict=True))


@pytest.mark.parametrize("name", METHODS)
def test_a_method_takes_the_steps_of_simulated_ranks(name: str, trained: Mapping[str, Any]) -> None:
    run = simulated(name)
    run.take(STEPS, SIMULATED[name])
    assert trained[name].losses == pytest.approx(run.losses, rel=CLOSE)
    weights = [rank.weight or 1.0 for rank in run.ranks]
    if name == "streaming":  # the ranks are not alike; each part has its own weights
        kept = [run.mean(lambda rank: rank.x, [rank.kept[n] or 1.0 for rank in run.ranks]) for n in (0, 1)]
        wanted = {key: kept[n][key] for n, names in enumerate(HALVES) for key in names}
    else:
        wanted = run.mean(lambda rank: rank.x, weights)
    assert apart(load_file(trained[name].model_file), wanted) < CLOSE
