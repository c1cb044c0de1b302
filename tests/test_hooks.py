"""Hooks: what they are told, what they ask for, and that ranks ask for the same."""

import json
from pathlib import Path
from typing import Any

import pytest
from small_tasks import Points

import samestep
from samestep.errors import UserError

HOOKS = """
import json, os
from pathlib import Path
import samestep

class Told(samestep.Hooks):
    def on_begin(self, began):
        self.file = Path(f"told-{began.rank}")
        self.write("begin", began.layout, began.world_size, began.first_step, began.total_steps)
    def on_step(self, stepped):
        self.write("step", stepped.step, stepped.loss, stepped.grad_norm, stepped.lr, stepped.samples)
    def on_evaluation(self, evaluated):
        self.write("evaluation", evaluated.step, sorted(evaluated.metrics))
    def on_checkpoint(self, saved):
        self.write("checkpoint", saved.step)
    def on_end(self, ended):
        self.write("end", ended.step, ended.stopped_early)
    def write(self, *values):
        with self.file.open("a") as file:
            print(json.dumps(values), file=file)

class Asks(Told):
    def on_step(self, stepped):
        super().on_step(stepped)
        if stepped.step == 1:
            return samestep.Ask(save=True, evaluate=True, log={"own/number": 5.0})
        if stepped.step == 4:
            return samestep.Ask(stop="enough")

class Unlike(samestep.Hooks):
    def on_begin(self, began):
        self.rank = began.rank
    def on_step(self, stepped):
        return samestep.Ask(stop="late") if self.rank == 1 else None

class Wrong(samestep.Hooks):
    def on_step(self, stepped):
        return stepped.loss < 1

class NeedsMore(samestep.Hooks):
    def __init__(self, limit):
        self.limit = limit

class NoHook:
    pass
"""


@pytest.fixture(autouse=True)
def in_a_folder_with_hooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.py").write_text(HOOKS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)


def train(hooks: str, layout: str = "single", **run: Any) -> samestep.TrainResult:
    recipe = samestep.Recipe(
        task=Points(samples=32, held_out=8), batch=8, steps=8, evaluation=samestep.Evaluation(every=3)
    )
    run = {"log": (), "threads": 1, "check": False, **run}
    return samestep.train(recipe, layout, folder="run", device="cpu", hooks=hooks, **run)


def lines_of(file: str) -> list[list[Any]]:
    return [json.loads(line) for line in Path(file).read_text(encoding="utf-8").splitlines()]


@pytest.mark.quick
def test_a_hook_is_told_what_the_records_have() -> None:
    result = train("own.py:Told", checkpoint=samestep.Checkpointing(every=5))
    told = lines_of("told-0")
    assert told[0] == ["begin", "single", 1, 0, 8]
    recorded = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text("utf-8").splitlines()]
    keys = ("step", "loss", "grad_norm", "lr", "samples")
    assert [line[1:] for line in told if line[0] == "step"] == [[line[key] for key in keys] for line in recorded]
    assert [line[1] for line in told if line[0] == "evaluation"] == [3, 6]
    assert [line[1] for line in told if line[0] == "checkpoint"] == [5]
    assert told[-1] == ["end", 8, None]


@pytest.mark.quick
def test_what_a_hook_asks_for_is_done_a_step_later() -> None:
    result = train("own.py:Asks", checkpoint=samestep.Checkpointing(keep=9), log=["prometheus"])
    assert result.steps == 6  # it asks after step 4, when step 5 is being computed
    assert result.stopped_early == "stopped early after step 6 by a hook: enough"
    report = json.loads((result.folder / "report.json").read_text(encoding="utf-8"))
    assert report["stopped_early"] == result.stopped_early
    saved = sorted(folder.name for folder in (result.folder / "checkpoints").iterdir() if folder.is_dir())
    assert [int(name.rpartition("-")[2]) for name in saved] == [3, 6]
    numbers = (result.folder / "metrics.prom").read_text(encoding="utf-8")
    assert 'samestep_own_number{run="Points"} 5.0' in numbers
    assert f'samestep_train_loss{{run="Points"}} {result.losses[-1]!r}' in numbers
    assert 'samestep_failed{run="Points"} 0.0' in numbers


def test_hooks_of_two_ranks_are_told_the_same_losses() -> None:
    train("own.py:Asks", "dp2", checkpoint=samestep.Checkpointing())
    first, second = ([line[:4] for line in lines_of(f"told-{rank}") if line[0] == "step"] for rank in (0, 1))
    assert first == second
    assert len(first) == 6


def test_ranks_that_ask_for_different_things_are_told() -> None:
    with pytest.raises((UserError, samestep.RankFailedError), match="rank 1 asks for a stop and rank 0 for nothing"):
        train("own.py:Unlike", "dp2")


@pytest.mark.quick
@pytest.mark.parametrize(
    ("hooks", "message"),
    [
        ("own.py:Tld", r'run\.hooks is "own\.py:Tld": Tld is not in own\.py; did you mean "Told"'),
        ("none.py:Told", r"run\.hooks: no file none\.py"),
        ("own.py:NoHook", r"is no subclass of samestep\.Hooks"),
        ("own.py:NeedsMore", "can't be made without arguments: TypeError"),
        ("own.py:Wrong", r'run\.hooks: "own\.py:Wrong" returned bool; return samestep\.Ask, or nothing'),
    ],
)
def test_what_is_no_hook_is_refused(hooks: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        train(hooks)


@pytest.mark.quick
def test_a_file_that_no_collector_reads_is_refused() -> None:
    log = [{"kind": "prometheus", "args": {"file": "numbers.txt"}}]
    with pytest.raises(UserError, match=r"run\.log: prometheus has args\.file 'numbers\.txt'; use a path whose name"):
        train("own.py:Told", log=log)
