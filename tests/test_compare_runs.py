"""Runs of a comparison that share the server of their ranks: the same training, the same ends, no rank left."""

import json
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Thread

import psutil
import pytest

import samestep
from samestep.comparison.methods import chosen
from samestep.comparison.runs import is_forked, run_forked
from samestep.environment import progress_every
from samestep.job import Inject, Job, Run
from samestep.progress.bars import Bar
from samestep.recipe import Evaluation

pytestmark = pytest.mark.timeout(120)

JOB = Job(
    recipe=samestep.Recipe(task="regression", args={"samples": 64, "held_out": 16}, batch=8, steps=4),
    run=Run(layout="dp2", device="cpu", threads=1, log=(), check=False),
)


def losses(folder: Path) -> list[float]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["loss"] for line in lines]


def ranks_alive() -> list[psutil.Process]:
    """What the server has forked that still runs."""
    forked = [rank for server in psutil.Process().children() for rank in server.children()]
    return [rank for rank in forked if rank.status() != psutil.STATUS_ZOMBIE]


def no_rank_left() -> bool:
    until = time.monotonic() + 10
    while ranks_alive() and time.monotonic() < until:
        time.sleep(0.1)
    return not ranks_alive()


def test_each_run_is_a_training_of_its_own(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    single = replace(JOB, run=replace(JOB.run, layout="single", folder=tmp_path / "single"))
    expected = samestep.train(single.recipe, "single", device="cpu", threads=1, folder=tmp_path / "single")
    capfd.readouterr()
    for name in ("first", "second"):
        outcome = run_forked(replace(JOB, run=replace(JOB.run, rank_lines=True)), tmp_path / name, limit=100)
        assert outcome.code == 0, outcome.output
        assert "rank 1" in outcome.output  # what ranks print is the run's
        assert losses(tmp_path / name) == pytest.approx(expected.losses, rel=1e-5)
    assert losses(tmp_path / "first") == losses(tmp_path / "second")
    print("said afterwards")
    printed = capfd.readouterr()
    assert (printed.out, printed.err) == ("said afterwards\n", "")


def _most_ranks(until: float) -> list[int]:
    """How many ranks there are, ten times a second."""
    found = [0]
    while time.monotonic() < until:
        with suppress(psutil.NoSuchProcess):
            found.append(len(ranks_alive()))
        time.sleep(0.1)
    return found


@pytest.mark.slow
def test_a_run_that_takes_too_long_is_ended_with_its_ranks(tmp_path: Path) -> None:
    hangs = (Inject(rank=1, step=2, fault="hang"),)
    endless = replace(JOB, run=replace(JOB.run, inject=hangs))
    began = time.monotonic()
    seen: list[int] = []
    watcher = Thread(target=lambda: seen.extend(_most_ranks(began + 6)))
    watcher.start()
    outcome = run_forked(endless, tmp_path / "run", limit=6)
    watcher.join()
    assert outcome.code is None
    assert max(seen) == 2  # so that a rank that is left would be found
    assert time.monotonic() - began < 60
    assert no_rank_left()


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        ({"layout": "tp3"}, 2, "samestep: "),
        ({"cut_at": ("nothing",)}, 2, "run.cut_at"),
    ],
)
def test_mistakes_are_told_as_the_command_tells_them(
    change: dict[str, object], code: int, words: str, tmp_path: Path
) -> None:
    job = replace(JOB, run=replace(JOB.run, **change))  # pyright: ignore[reportArgumentType]
    outcome = run_forked(job, tmp_path / "run", limit=60)
    assert (outcome.code, outcome.output.startswith("samestep: ")) == (code, True)
    assert words in outcome.output


def test_a_rank_that_fails_is_told_with_its_error(tmp_path: Path) -> None:
    job = replace(JOB, run=replace(JOB.run, inject=(Inject(rank=0, step=1, fault="nan"),)))
    outcome = run_forked(job, tmp_path / "run", limit=60)
    assert outcome.code == 1
    assert "samestep: " in outcome.output
    assert no_rank_left()


@pytest.mark.parametrize(
    ("name", "can"),
    [("single", False), ("ddp-torchrun", False), ("accelerate-ddp", False), ("dp2", True), ("native:tp2", True)],
)
def test_only_several_ranks_of_our_own_engine_are_started_from_here(name: str, can: bool) -> None:
    (method,) = chosen([name], 2)
    assert is_forked(method) is can


def test_a_training_may_do_without_evaluations(tmp_path: Path) -> None:
    recipe = replace(JOB.recipe, evaluation=Evaluation(at_end=False))
    found = samestep.train(recipe, device="cpu", threads=1, folder=tmp_path / "run", log=())
    assert found.metrics == {}
    assert found.evaluation_seconds == 0.0
    assert (tmp_path / "run" / "evaluations.jsonl").read_text(encoding="utf-8") == ""


def test_a_bar_says_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_every("30s"), Bar("compare", 3) as bar:
        bar.say("first")
        bar.advance()
        bar.say("second")
    lines = capsys.readouterr().err.splitlines()
    assert [line.rpartition(",")[0] for line in lines] == ["compare: first (1 of 3", "compare: second (2 of 3"]
