"""`samestep drill`: a job under one fault after the other, beside its undisturbed run."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from samestep.cli.main import main
from samestep.drill.disturbances import Processes, last_step_in
from samestep.drill.drill import Drill, FaultOutcome, FinishedRun, row_of
from samestep.drill.faults import DRILLS
from samestep.drill.under_faults import still_there

TESTS = Path(__file__).parent
JOB = f"""
recipe: {{task: {TESTS}/small_tasks.py:Unscored, batch: 16, precision: fp64}}
run: {{layout: dp2, threads: 1, log: []}}
"""

# The step waits until its checkpoint is complete.
AT_ONCE = ("--set", "run.checkpoint={asynchronous: false}")


@pytest.fixture
def job(tmp_path: Path) -> str:
    file = tmp_path / "job.yaml"
    file.write_text(JOB, encoding="utf-8")
    return str(file)


def drilled(job: str, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[dict[str, Any], str]:
    file = Path(job).with_suffix(".json")
    code = main(["drill", job, "--json", str(file), "--force", *words])
    printed = capsys.readouterr()
    assert code == 0, printed.out + printed.err
    return json.loads(file.read_text(encoding="utf-8")), printed.out


def test_a_fault_is_survived_and_the_result_is_the_same(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    found, table = drilled(job, capsys, "--layout", "single", "--faults", "kill", "--steps", "8", *AT_ONCE)
    (kill,) = found["faults"]
    assert found["passed"]
    # Saved every second step: when the fault comes, in step 4, the checkpoint after 4 steps is complete.
    known = {name: kill[name] for name in ("fault", "survived", "difference", "same_weights", "passed")}
    assert known == {"fault": "kill", "survived": True, "difference": 0, "same_weights": True, "passed": True}
    assert kill["steps_lost"] == 0
    assert kill["happened"].startswith("rank 0 in step 4: its process was ended by SIGKILL")
    assert "survived" in table


@pytest.mark.slow
def test_ranks_that_can_not_act_end_with_their_supervisor(job: str, tmp_path: Path) -> None:
    """One holds Python's lock for good, the other is stopped: only the kernel can end them."""
    folder = tmp_path / "run"
    words = ["--folder", str(folder), "--set", "run.inject={rank: 0, step: 3, fault: deadlock}"]
    words += ["--set", "run.check=false", "--set", "recipe.steps=1000", "--set", "run.hang_limit=100"]
    with subprocess.Popen([sys.executable, "-m", "samestep", "train", job, *words]) as started:
        job_processes = Processes(started, folder, 2)
        try:
            until = time.monotonic() + 90
            while last_step_in(folder / "metrics.jsonl") < 1:  # a step's record is written a step late
                assert time.monotonic() < until
                time.sleep(0.05)
            time.sleep(0.5)  # until step 3 begins
            os.kill(job_processes.ranks()[1], signal.SIGSTOP)
            processes = job_processes.tree()
            started.kill()
            assert still_there(processes, within=10) == 0
        finally:
            job_processes.kill()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_every_fault_is_survived(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    found, table = drilled(job, capsys)
    assert [each["fault"] for each in found["faults"]] == [drill.name for drill in DRILLS]
    assert all(each["passed"] for each in found["faults"])
    assert table.count("survived") == len(DRILLS)
    same = {each["fault"]: each["difference"] == 0 for each in found["faults"]}
    assert same == {drill.name: not drill.changes_result for drill in DRILLS}


def left(folder: Path, loss: float, weights: bytes) -> FinishedRun:
    folder.mkdir()
    (folder / "report.json").write_text(json.dumps({"final_loss": loss}), encoding="utf-8")
    (folder / "model.safetensors").write_bytes(weights)
    return FinishedRun(code=0, output="", folder=folder)


@pytest.mark.parametrize(
    ("loss", "weights", "passed"), [(1.0, b"same", True), (1.1, b"same", False), (1.0, b"", False)]
)
def test_a_run_with_another_result_has_not_passed(tmp_path: Path, loss: float, weights: bytes, passed: bool) -> None:
    drill = Drill(name="fire", does="fire", run=lambda runs: FaultOutcome(survived=True, happened="", left=mine))
    undisturbed, mine = left(tmp_path / "undisturbed", 1.0, b"same"), left(tmp_path / "fire", loss, weights)
    assert row_of(drill, FaultOutcome(survived=True, happened="", left=mine), undisturbed).passed == passed
    assert not row_of(drill, FaultOutcome(survived=False, happened="", left=mine), undisturbed).passed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--faults", "kil"], 'unknown fault "kil"; did you mean "kill"? known: ctrl-c, hang, kill'),
        (["--layout", "single", "--faults", "slow"], 'fault "slow" wants 2 processes; use layout dp2'),
        (["--steps", "3"], "--steps is 3; it must be a whole number from 8 to"),
        (["--time-limit", "0"], '--time-limit: "0" is no time; use seconds above 0'),
        (["--json", "nowhere/drill.json"], "--json nowhere/drill.json: there is no folder nowhere"),
        (["--engine", "nobody"], "nobody"),
    ],
)
def test_a_mistake_is_one_message(
    job: str, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["drill", job, *words]) == 2
    assert message in capsys.readouterr().err


def test_under_a_launcher_it_is_refused(
    job: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["drill", job]) == 2
    assert "drill starts its own processes; start it without a launcher" in capsys.readouterr().err
