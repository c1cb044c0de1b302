"""`run.share_replicas`: the same step from one copy, what ranks hold, checkpoints, kills, and what is refused."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from proving import prove, same
from resuming import job_of, train_all
from shared_replica_ranks import both_ways, one_copy, steps_until_killed, told_on_two_hosts, told_without_memory
from small_tasks import Points, ScoredWords
from sparse_row_ranks import Branches, Ids, Tied
from torch import nn

import samestep
from samestep.errors import RankFailedError, UserError
from samestep.launch import local
from samestep.parallel.optimizer.shared import share_out
from samestep.validation import checked

SHARED: Mapping[str, Any] = {"share_replicas": True}


def recipe(task: samestep.Task, **more: Any) -> samestep.Recipe:
    values = {"task": task, "batch": 33, "epochs": 1, "clip": 0.5, "optimizer": samestep.AdamW(lr=1e-2)}
    return checked(samestep.Recipe, {**values, **more}, prefix=("recipe",))


class Scaled(nn.Module):
    """A scale that is one number alone, not one in a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class Normed(Points):
    """Batch norm, a frozen layer, and a scale."""

    def model(self) -> nn.Module:
        net = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.GELU(), Scaled(), nn.Linear(16, self.classes))
        net[0].weight.requires_grad_(False)
        return net


RECIPES: Mapping[str, samestep.Recipe] = {
    "points": recipe(Points(), schedule=samestep.Schedule(warmup=3, decay="linear")),
    "branches": recipe(Ids(Branches)),
    "tied": recipe(Ids(Tied), optimizer=samestep.SGD(lr=0.1, momentum=0.9), clip=None),
    "batch norm": recipe(Normed()),
}
CASES = {
    f"{name} {run}": (each, {**SHARED, **run})
    for name, each in RECIPES.items()
    for run in ({}, {"micro_batch": 4})
    if name != "batch norm" or not run
}


@pytest.mark.parametrize("layout", ["dp2", pytest.param("dp3", marks=pytest.mark.slow)])
def test_shared_replicas_take_the_steps_of_one_process(layout: str) -> None:
    cases = {name: (each, layout, run) for name, (each, run) in CASES.items()}
    assert same(prove(cases), list(cases)) == {}


def test_ranks_hold_one_copy_together() -> None:
    recipes = {"points": recipe(Points(), clip=None), "branches": recipe(Ids(Branches), clip=None)}
    ranks = local.start(both_ways, (recipes, "dp2", 4), 2)
    for name, job in recipes.items():
        apart, _, plain = ranks[0][name]
        assert apart == ranks[1][name][0] == []
        shared = [rank[name][1] for rank in ranks]
        assert isinstance(job.task, samestep.Task)
        counts = len(list(job.task.model().parameters())) * 4
        assert sum(each.parameters for each in shared) == plain.parameters
        assert sum(each.optimizer_state for each in shared) - plain.optimizer_state < counts
        assert max(each.optimizer_state for each in shared) < 0.6 * plain.optimizer_state
        assert all(each.sent["all-reduce"] < 200 for each in shared)  # flags, norm and loss


def test_what_one_rank_writes_the_other_reads() -> None:
    assert local.start(one_copy, (recipe(Points()),), 2) == []


def test_a_killed_rank_is_told_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = tmp_path / "memory"  # in the place of /dev/shm, where other tests' jobs have folders meanwhile
    memory.mkdir()
    monkeypatch.setattr("samestep.fault_tolerance.scratch._IN_MEMORY", memory)
    endless = recipe(Points(), epochs=None, steps=100_000)
    with pytest.raises(RankFailedError):
        local.start(steps_until_killed, (endless, str(tmp_path), 1), 2)
    assert "Connection closed by peer" in (tmp_path / "told-0").read_text(encoding="utf-8")
    assert "memfd:samestep (deleted)" in (tmp_path / "maps-0").read_text(encoding="ascii")
    assert list(memory.iterdir()) == []


TO_TWO = [("shared", "shared"), ("shared", "plain"), ("plain", "shared")]
TO_THREE = [("shared", "three"), ("three", "shared")]


@pytest.mark.parametrize("pairs", [TO_TWO, pytest.param(TO_THREE, marks=pytest.mark.slow)])
def test_checkpoints_go_from_any_layout_to_any(pairs: list[tuple[str, str]], tmp_path: Path) -> None:
    given = recipe(ScoredWords(samples=45), batch=10, epochs=None, steps=8, precision="fp64")
    ways: Mapping[str, tuple[str, Mapping[str, Any]]] = {
        "shared": ("dp2", SHARED),
        "plain": ("dp2", {}),
        "three": ("dp3", SHARED),
    }

    def job(way: str, name: str, **checkpoint: Any) -> Any:
        layout, run = ways[way]
        return job_of(given, layout, tmp_path / name, checkpoint=checkpoint, **run)

    names = list(dict.fromkeys(name for pair in pairs for name in pair))
    saved = dict(zip(names, train_all([job(name, name, every=3, keep=9) for name in names]), strict=True))
    resumed = train_all([job(to, f"{of} to {to}", resume=str(_step_3(tmp_path / of))) for of, to in pairs])
    for (of, to), result in zip(pairs, resumed, strict=True):
        assert result.first_step == 3
        if of == to:
            assert result.losses == saved[of].losses[3:]
        assert result.losses == pytest.approx(saved[of].losses[3:], rel=1e-10)
        assert result.metrics["accuracy"] == pytest.approx(saved[of].metrics["accuracy"])


def _step_3(folder: Path) -> Path:
    return folder / "checkpoints" / "step-3"


@pytest.mark.slow
def test_a_killed_training_goes_on(tmp_path: Path) -> None:
    given = recipe(Points(), precision="fp64")
    quiet = {"layout": "dp2", "threads": 1, "log": (), **SHARED}
    whole = samestep.train(given, folder=tmp_path / "whole", **quiet)
    killed = samestep.train(
        given,
        folder=tmp_path / "killed",
        max_restarts=1,
        inject={"rank": 1, "step": 4, "fault": "kill"},
        checkpoint={"every": 2, "resume": "auto"},
        **quiet,
    )
    assert killed.losses[-2:] == whole.losses[-2:]


def test_rows_are_shared_out_evenly() -> None:
    sizes = [(5, 7), (1, 1), (300, 4), (3, 0), (10, 100)]
    for ranks in (2, 3, 7):
        shares = share_out(sizes, ranks)
        for (rows, _), ranges in zip(sizes, shares, strict=True):
            assert [row for first, last in ranges for row in range(first, last)] == list(range(rows))
        loads = [
            sum((last - first) * row for (_, row), (first, last) in zip(sizes, of_rank, strict=True))
            for of_rank in zip(*shares, strict=True)
        ]
        assert sum(loads) == 35 + 1 + 1200 + 1000
        assert max(abs(load - 2236 / ranks) for load in loads) <= 100  # a row, the longest


@pytest.mark.parametrize(
    ("layout", "more", "told"),
    [
        ("fsdp2", {}, r'layout "fsdp2": run.share_replicas is true, which is for plain replicas; use dp2'),
        ("dp2 tp2", {}, r'layout "dp2 tp2": run.share_replicas is true, which is for plain replicas; use dp4'),
        ("dp2 offload=optimizer", {}, r"stay in shared memory; use dp2 without offload=optimizer"),
        ("dp2", {"engine": "accelerate"}, r'true, which engine "accelerate" does not have; use engine native'),
        ("dp2", {"sparse_rows": "on"}, r"ranks that share memory send no gradients; use sparse_rows: auto"),
        ("dp2", {"bucket_mb": 4.0}, r"run.bucket_mb is 4, and ranks that share memory send no gradients; use one"),
        ("dp2", {"share_replicas": 2}, r"run.share_replicas is 2; it should be true or false"),
    ],
)
def test_what_can_not_be_had_is_refused(layout: str, more: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told):
        samestep.train(RECIPES["points"], layout=layout, **{**SHARED, **more})


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"precision": "fp16"}, r"recipe.precision is fp16, whose overflows one rank sees alone; use bf16"),
        ({"communication": {"kind": "bf16"}}, r"recipe.communication is bf16, .* use share_replicas: false"),
    ],
)
def test_recipes_that_can_not_be_had_are_refused(more: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told):
        samestep.train(recipe(Points(), **more), layout="dp2", **SHARED)


def test_hosts_and_memory_that_are_not_there_are_told() -> None:
    given = recipe(Points())
    assert local.start(told_on_two_hosts, (given,), 2) == (
        'layout "dp2": run.share_replicas is true, and the ranks are on 2 hosts, which share no memory; '
        "use share_replicas: false"
    )
    assert "bytes of shared memory are needed: No space left on device; use" in local.start(
        told_without_memory, (given,), 2
    )
