"""Trainings that outlive faults: restarts, hangs, losses that are not finite, slow ranks, lost ranks."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import plain_loop
import pytest
from faulty_tasks import Counted, Poisoned, Stopped
from safetensors.torch import load_file
from several_loss_tasks import TwoTerms
from small_jobs import faults_in, lines_in
from small_tasks import Points
from turn_tasks import Gan

import samestep
from samestep.data.order import SampleOrder
from samestep.engines.base import Abilities
from samestep.engines.native.engine import Native
from samestep.fault_tolerance import watchdog
from samestep.fault_tolerance.injection import InjectedFaultError, Injection
from samestep.job import Inject

STEPS = 9
# Saved before the step goes on, so that which steps are lost is not a matter of time.
SAVES: dict[str, Any] = {"every": 3, "asynchronous": False}


def recipe(task: samestep.Task | None = None, **values: Any) -> samestep.Recipe:
    return samestep.Recipe(task=task or Points(), batch=16, **{"steps": STEPS, **values})


class SeldomFirst(Gan):
    """The turn that not every step has comes first."""

    def turns(self) -> Sequence[samestep.Turn]:
        return super().turns()[::-1]


def train(folder: Path, layout: str = "dp2", task: samestep.Task | None = None, **run: Any) -> samestep.TrainResult:
    values = {"checkpoint": SAVES, "log": (), "threads": 1, **run}
    return samestep.train(recipe(task, precision="fp64"), layout=layout, folder=folder, **values)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> samestep.TrainResult:
    return train(tmp_path_factory.mktemp("undisturbed"), checkpoint=None)


def is_the_same(result: samestep.TrainResult, undisturbed: samestep.TrainResult) -> bool:
    """Bit for bit, the weights too."""
    return (
        result.losses == undisturbed.losses and result.model_file.read_bytes() == undisturbed.model_file.read_bytes()
    )


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("kill", "its process was ended by SIGKILL"),
        ("raise", "InjectedFaultError: planted in rank 1 at step 7"),
        pytest.param("oom", "MemoryError", marks=pytest.mark.slow),
    ],
)
def test_a_failed_rank_is_named_and_all_go_on_from_the_last_checkpoint(
    tmp_path: Path, undisturbed: samestep.TrainResult, capfd: pytest.CaptureFixture[str], fault: str, cause: str
) -> None:
    result = train(tmp_path, max_restarts=1, inject={"rank": 1, "step": 7, "fault": fault})
    assert is_the_same(result, undisturbed)
    (found,) = faults_in(tmp_path)
    assert cause in found["cause"]
    known = {name: found[name] for name in ("round", "rank", "step", "goes_on_at", "steps_lost")}
    assert known == {"round": 0, "rank": 1, "step": 7, "goes_on_at": 6, "steps_lost": 1}
    assert 0 < found["seconds"] < 30
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("samestep: rank")]
    assert line.startswith("samestep: rank 1 failed in step 7: ")
    assert "goes on at step 6, 1 step lost" in line


@pytest.mark.slow
def test_without_checkpoints_a_restart_begins_anew(tmp_path: Path, undisturbed: samestep.TrainResult) -> None:
    result = train(tmp_path, checkpoint=None, max_restarts=1, inject={"rank": 0, "step": 4, "fault": "kill"})
    assert is_the_same(result, undisturbed)
    (found,) = faults_in(tmp_path)
    assert (found["goes_on_at"], found["steps_lost"]) == (0, 4)


def test_when_restarts_are_used_up_the_failure_is_told(tmp_path: Path) -> None:
    planted = {"rank": 1, "step": 4, "fault": "raise", "every_round": True}
    with pytest.raises(samestep.RankFailedError, match="planted in rank 1 at step 4") as caught:
        train(tmp_path, max_restarts=1, inject=planted)
    assert caught.value.rank == 1
    assert [(found["round"], found["goes_on_at"]) for found in faults_in(tmp_path)] == [(0, 3), (1, None)]


def test_a_users_mistake_is_not_tried_again(tmp_path: Path) -> None:
    # Without the check of the contract, which would find it before any rank starts.
    with pytest.raises(samestep.UserError, match=r"^the user's fault, seen late$"):
        train(tmp_path / "run", task=Counted(folder=str(tmp_path)), max_restarts=3, check=False)
    assert len(list(tmp_path.glob("start-*"))) == 1


def test_a_rank_that_hangs_is_named_with_its_stack(
    tmp_path: Path, undisturbed: samestep.TrainResult, capfd: pytest.CaptureFixture[str]
) -> None:
    planted = {"rank": 0, "step": 7, "fault": "hang"}
    result = train(tmp_path, max_restarts=1, hang_limit="2s", inject=planted)
    assert is_the_same(result, undisturbed)
    (found,) = faults_in(tmp_path)
    assert (found["rank"], found["step"], found["goes_on_at"]) == (0, 7, 6)
    told = re.search(r"it hung in step 7: no rank moved on for (\d+) s", found["cause"])
    assert told is not None
    assert int(told[1]) >= 2  # five times the longest step, where that is more
    assert 'fault_tolerance/injection.py", line' in found["reason"]
    assert found["reason"].splitlines()[1].endswith("in _hang")
    assert found["seconds"] > 2


@pytest.mark.slow
def test_a_stopped_rank_is_named_with_its_stack(tmp_path: Path) -> None:
    with pytest.raises(samestep.RankFailedError, match=r"it was stopped \(SIGSTOP\)") as caught:
        train(tmp_path, task=Stopped(call=4), hang_limit=2)
    assert caught.value.rank == 1
    assert "it hung in step 3" in caught.value.reason
    assert "faulty_tasks.py" in caught.value.reason


def test_the_rank_that_did_not_enter_is_found() -> None:
    # Rank 2 is where nobody waits for it in its pair, rank 0 waits for 1, which waits for 3.
    counts: Mapping[int, Mapping[str, int]] = {
        0: {"0,1#1": 5, "0,1,2,3#1": 2},
        1: {"0,1#1": 4, "1,3#1": 8, "0,1,2,3#1": 2},
        2: {"0,1,2,3#1": 2},
        3: {"1,3#1": 7, "0,1,2,3#1": 2},
    }
    assert watchdog.behind(counts) == [3]
    assert watchdog.behind({0: {"0,1#1": 5}, 1: {"0,1#1": 5}}) == []


def test_a_loss_that_is_not_finite_stops_the_training(tmp_path: Path) -> None:
    planted = {"rank": 1, "step": 4, "fault": "nan"}
    with pytest.raises(samestep.NonFiniteError, match=r"step 4: loss nan, gradient norm nan") as caught:
        train(tmp_path, max_restarts=1, inject=planted)
    found = json.loads(Path(caught.value.file).read_text(encoding="utf-8"))
    expected = SampleOrder(size=200, batch=16, seed=0).global_batch(4).tolist()
    assert found["samples"] == expected
    assert ", ".join(map(str, expected[:3])) in str(caught.value)
    steps = lines_in(tmp_path / "metrics.jsonl")
    assert (steps[4]["loss"], steps[4]["grad_norm"]) == (None, None)
    assert not (tmp_path / "faults.jsonl").exists()


@pytest.mark.parametrize("task", [TwoTerms(), SeldomFirst(every=2)], ids=lambda task: type(task).__name__)
def test_a_planted_nan_is_in_the_loss_of_terms_and_of_turns(tmp_path: Path, task: samestep.Task) -> None:
    planted = {"rank": 0, "step": 2, "fault": "nan"}
    how: dict[str, Any] = {"threads": 1, "log": (), "inject": planted, "on_nonfinite": "skip"}
    result = samestep.train(recipe(task, steps=4), layout="single", folder=tmp_path, **how)
    assert [math.isfinite(loss) for loss in result.losses] == [True, True, False, True]


@pytest.mark.parametrize(
    ("layout", "policy"),
    [
        ("dp2", "skip"),
        ("single", "rollback"),
        pytest.param("single", "skip", marks=pytest.mark.slow),
        pytest.param("dp2", "rollback", marks=pytest.mark.slow),
    ],
)
def test_a_batch_that_is_not_finite_is_left_out_as_a_plain_loop_would(
    tmp_path: Path, layout: str, policy: str, capfd: pytest.CaptureFixture[str]
) -> None:
    bad = int(SampleOrder(size=200, batch=16, seed=0).global_batch(5)[3])
    settings: dict[str, Any] = {
        "optimizer": samestep.SGD(lr=0.1, momentum=0.9),
        "schedule": samestep.Schedule(warmup=3, decay="linear"),
        "precision": "fp64",
    }
    task = Poisoned(sample=bad)
    expected = plain_loop.train(recipe(task, **settings), task, left_out=[5])
    result = samestep.train(
        recipe(task, **settings),
        layout=layout,
        folder=tmp_path,
        on_nonfinite=policy,
        checkpoint=SAVES,
        log=(),
        threads=1,
    )
    assert math.isnan(result.losses[5])
    assert [*result.losses[:5], *result.losses[6:]] == pytest.approx(
        [*expected.losses[:5], *expected.losses[6:]], rel=1e-12
    )
    weights = load_file(result.model_file)
    for name, value in expected.weights.items():
        assert weights[name].numpy() == pytest.approx(value.numpy(), rel=1e-10, abs=1e-12)
    assert json.loads((tmp_path / "nonfinite-step-5.json").read_text(encoding="utf-8"))["samples"].count(bad) == 1
    errors = capfd.readouterr().err
    assert ("the step is left out" if policy == "skip" else "back to the last checkpoint") in errors


def test_a_training_that_is_never_finite_comes_to_an_end(tmp_path: Path) -> None:
    task = Points()
    task.pairs = [(point * float("nan"), label) for point, label in task.pairs]
    with pytest.raises(samestep.NonFiniteError):
        train(tmp_path, "single", task, on_nonfinite="rollback")


@pytest.mark.slow
def test_a_slow_rank_is_named(tmp_path: Path) -> None:
    planted = {"rank": 1, "step": 1, "fault": "slow", "seconds": 0.4}
    result = train(tmp_path, inject=planted)
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert report["slow_ranks"] == [1]
    assert report["own_step_seconds"] == list(result.own_step_seconds)
    assert result.own_step_seconds[1] > 0.4 > 2 * result.own_step_seconds[0]  # a busy machine slows both


def test_a_lost_rank_is_done_without(tmp_path: Path, undisturbed: samestep.TrainResult) -> None:
    planted = {"rank": 2, "step": 4, "fault": "kill", "every_round": True}
    result = train(tmp_path, "dp3", elastic=True, max_restarts=1, min_processes=2, inject=planted)
    assert result.losses == pytest.approx(undisturbed.losses, rel=1e-12)
    found = faults_in(tmp_path)
    assert [(each["layout"], each["next_layout"]) for each in found] == [("dp3", "dp3"), ("dp3", "dp2")]
    assert found[-1]["goes_on_at"] == 3


MISTAKES: list[tuple[str, dict[str, Any], str]] = [
    ("dp2", {"max_restarts": -1}, r"run.max_restarts is -1; it should be greater than or equal to 0"),
    ("dp2", {"max_restarts": "many"}, r"run.max_restarts is 'many'; it should be a whole number"),
    (
        "dp2",
        {"hang_limit": 0},
        r"run.hang_limit is 0; it should be seconds above 0, or a time such as",
    ),
    (
        "dp2",
        {"hang_limit": "soon"},
        r"run.hang_limit is 'soon'; it should be seconds above 0, or a time such as 90s, 10m or 1h",
    ),
    ("dp2", {"grace_period": True}, r"run.grace_period is true; it should be a number"),
    ("dp2", {"on_nonfinite": "ignore"}, r"run.on_nonfinite is 'ignore'; it should be 'stop', 'skip' or 'rollback'"),
    ("dp2", {"inject": {"rank": 1, "step": 2, "fault": "fire"}}, r"run.inject.fault is 'fire'; it should be 'kill'"),
    ("dp2", {"inject": {"rank": 1, "fault": "kill"}}, r"run.inject.step is missing"),
    (
        "dp2",
        {"inject": [{"rank": 2, "step": 1, "fault": "kill"}]},
        r'rank 2 is not there; layout "dp2" has',
    ),
    ("dp2", {"inject": {"rank": 0, "step": 99, "fault": "kill"}}, r"step 99 is never taken; the training's last one"),
    (
        "dp2",
        {"inject": {"rank": 0, "step": 2, "fault": "nan", "when": "now"}},
        r"fault nan is committed in a step that is said, and has when: now; use step alone, or kill",
    ),
    ("tp2", {"elastic": True}, r'layout "tp2" has no replicas or shards to go on with fewer of'),
    ("dp2", {"elastic": True, "min_processes": 3}, r'run.min_processes is 3, and layout "dp2" has 2; use fewer'),
]


@pytest.mark.parametrize(("layout", "run", "message"), MISTAKES)
def test_a_mistake_is_refused(tmp_path: Path, layout: str, run: dict[str, Any], message: str) -> None:
    with pytest.raises(samestep.UserError, match=message):
        train(tmp_path / "run", layout, **run)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


class Eager(Native):
    """An engine whose steps can't be left out."""

    name = "eager"
    abilities: ClassVar[Abilities] = replace(Native.abilities, skips=False)


def test_an_engine_that_takes_every_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(samestep.UserError, match=r"run.on_nonfinite is skip, and engine .* takes every step"):
        train(tmp_path, engine=Eager(), on_nonfinite="skip")


def test_restarts_under_a_launcher_are_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(samestep.UserError, match=r"run.max_restarts is 2, and a launcher started these ranks"):
        train(tmp_path, max_restarts=2)


def test_a_fault_waits_for_its_file_in_whatever_round(tmp_path: Path) -> None:
    file = tmp_path / "now"
    faults = [Inject(rank=0, step=2, fault="raise", when=file)]
    again = Injection(faults, rank=0, number=1)
    again.before(5)  # there is no file
    file.touch()
    Injection(faults, rank=1, number=0).before(5)  # another's
    again.before(1)  # too early
    with pytest.raises(InjectedFaultError, match=r"planted in rank 0 at step 6 by run.inject"):
        again.before(6)
    assert not file.exists()
    again.before(7)
