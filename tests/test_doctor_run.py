"""`samestep doctor RUN_FOLDER`: what a run's files tell, of real runs and of planted faults."""

import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from small_tasks import Points

import samestep
from samestep.cli.main import main
from samestep.doctor.findings import DoctorFinding
from samestep.doctor.run import CHECKS, read
from samestep.fault_tolerance import lease

Steps = list[dict[str, Any]]


def steps_of(count: int = 40) -> Steps:
    """The lines of a run in which all is well."""
    return [
        {
            "step": step,
            "epoch": 0,
            "loss": 2.0 - step / count,
            "grad_norm": 1.0,
            "lr": 0.1,
            "samples": 8,
            "step_seconds": 0.01,
            "data_seconds": 0.0001,
        }
        for step in range(count)
    ]


REPORT = {"steps": 40, "final_loss": 1.0, "device": "cpu", "peak_memory_bytes": [2**20, 2**20]}


def write_run(
    folder: Path,
    steps: Sequence[Mapping[str, Any]] | None = None,
    *,
    report: Mapping[str, Any] | None = REPORT,
    evaluations: Sequence[Mapping[str, Any]] = ({"step": 40, "accuracy": 0.9},),
    faults: Sequence[Mapping[str, Any]] | None = None,
    seconds_ago: float = 3600,
) -> Path:
    for name, values in (
        ("metrics.jsonl", steps_of() if steps is None else steps),
        ("evaluations.jsonl", evaluations),
        ("faults.jsonl", faults),
    ):
        if values is not None:
            (folder / name).write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")
    if report is not None:
        (folder / "report.json").write_text(json.dumps(report), encoding="utf-8")
    then = time.time() - seconds_ago
    os.utime(folder / "metrics.jsonl", (then, then))
    return folder


def odd(findings: Sequence[DoctorFinding]) -> list[tuple[str, str]]:
    return [(each.subject, each.verdict) for each in findings if each.verdict != "ok"]


def test_a_real_run_has_nothing_to_find(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = samestep.Recipe(task=Points(), batch=16, steps=40)
    samestep.train(recipe, device="cpu", folder=tmp_path / "run", log=())
    capsys.readouterr()
    file = tmp_path / "found.json"
    assert main(["doctor", str(tmp_path / "run"), "--json", str(file)]) == 0
    found = {each["subject"]: each for each in json.loads(file.read_text(encoding="utf-8"))}
    assert set(found) >= {"end", "steps", "loss", "evaluations", "data", "slow steps", "memory"}
    assert found["end"]["text"] == "the run came to its end, 40 steps"
    assert found["steps"]["text"] == "0 to 39, none missing"
    assert found["loss"]["verdict"] == "ok"
    assert "problem: 0" in capsys.readouterr().out


def test_a_good_run_of_which_all_is_known_has_no_warning(tmp_path: Path) -> None:
    assert odd(list(read(write_run(tmp_path)))) == []


def test_the_term_of_a_plan_that_was_off_is_named(tmp_path: Path) -> None:
    usage = {"parameters": 4 << 20, "optimizer_state": 8 << 20, "activations": 2 << 20}
    usage |= {"gathered_and_gradients": 4 << 20, "sent": {"all-reduce": 0}}
    causes = {"products": 0.004, "passes": 0.002, "operators": 0.002, "messages": 0.001, "bytes sent": 0.001}
    plan = {"step_seconds": 0.010, "seconds_by_cause": causes, "usage_bytes": [usage]}
    report = {**REPORT, "own_step_seconds": [0.008, 0.008], "usage_bytes": [usage, usage]}
    file = write_run(tmp_path, report=report) / "plan.json"
    file.write_text(json.dumps(plan), encoding="utf-8")
    assert odd(list(read(tmp_path))) == []
    slow = {**plan, "step_seconds": 0.020, "seconds_by_cause": {**causes, "messages": 0.011}}
    more = {**usage, "activations": 3 << 20}
    file.write_text(json.dumps({**slow, "usage_bytes": [more]}), encoding="utf-8")
    time_, memory = (each for each in read(tmp_path) if each.subject == "plan")
    assert "messages and waiting, 0.012 s planned, 0.002 s measured" in time_.text
    assert "--comm" in (time_.remedy or "")
    assert "activations, 3 MiB planned, 2 MiB measured" in memory.text
    file.write_text(json.dumps({"seconds_by_cause": 3, "usage_bytes": [1]}), encoding="utf-8")
    assert odd(list(read(tmp_path))) == [("plan", "warning")]


@dataclass(frozen=True, kw_only=True)
class Planted:
    """A fault in a run's files, and the finding that tells it."""

    change: Callable[[Steps], object]
    subject: str
    verdict: str
    text: str
    report: Mapping[str, Any] | None = None


def _set(steps: Steps, where: slice, **values: Any) -> None:
    for step in steps[where]:
        step.update(values)


def _rise(steps: Steps) -> None:
    for step in steps:
        step["loss"] = 1.0 + step["step"]


PLANTED = {
    "nan": Planted(
        change=lambda steps: _set(steps, slice(17, 20), loss=math.nan),
        subject="loss",
        verdict="problem",
        text="not finite at step 17 and 2 more",
    ),
    "null": Planted(
        change=lambda steps: _set(steps, slice(39, 40), loss=None),
        subject="loss",
        verdict="problem",
        text="not finite at step 39",
    ),
    "infinite": Planted(
        change=lambda steps: _set(steps, slice(0, 1), loss=math.inf),
        subject="loss",
        verdict="problem",
        text="not finite at step 0",
    ),
    "flat": Planted(
        change=lambda steps: _set(steps, slice(None), loss=1.5),
        subject="loss",
        verdict="warning",
        text="did not fall: from 1.5 to 1.5",
    ),
    "rising": Planted(change=_rise, subject="loss", verdict="problem", text="rose: from 2.5 to 38.5"),
    "gradients": Planted(
        change=lambda steps: _set(steps, slice(5, 6), grad_norm=math.inf),
        subject="gradients",
        verdict="warning",
        text="1 steps with a norm that is not finite, the first 5",
    ),
    "gap": Planted(
        change=lambda steps: steps.__delitem__(slice(10, 13)),
        subject="steps",
        verdict="problem",
        text="3 steps are missing between 0 and 39, the first of them 10",
    ),
    "cut": Planted(
        change=lambda steps: steps.__delitem__(slice(30, None)),
        subject="steps",
        verdict="problem",
        text="the report says 40 steps, and the last that was written is 29",
    ),
    "loader": Planted(
        change=lambda steps: _set(steps, slice(None), data_seconds=0.03),
        subject="data",
        verdict="warning",
        text="75% of the time is spent waiting for samples",
    ),
    "slow": Planted(
        change=lambda steps: _set(steps, slice(20, 22), step_seconds=0.5),
        subject="slow steps",
        verdict="warning",
        text="2 of 37 took more than 3 times the median (0.01 s), 73% of the time; the worst, step 20, 0.5 s",
    ),
    "slow rank": Planted(
        change=lambda steps: None,
        subject="slow ranks",
        verdict="warning",
        text="rank 1 (0.03 s) a step without waiting for others; the median of all is 0.01 s",
        report={**REPORT, "slow_ranks": [1], "own_step_seconds": [0.01, 0.03, 0.01]},
    ),
    "memory": Planted(
        change=lambda steps: None,
        subject="memory",
        verdict="warning",
        text="the ranks held 60 GiB at their peaks; this machine has 64 GiB",
        report={**REPORT, "peak_memory_bytes": [30 * 2**30, 30 * 2**30]},
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_the_one_thing_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=64 * 2**30))
    planted, steps = PLANTED[name], steps_of()
    planted.change(steps)
    found = [
        each for each in read(write_run(tmp_path, steps, report=planted.report or REPORT)) if each.verdict != "ok"
    ]
    assert odd(found) == [(planted.subject, planted.verdict)]
    assert planted.text in found[0].text
    assert found[0].remedy


def test_a_run_that_ended_early_is_a_problem_and_one_that_goes_on_is_not(tmp_path: Path) -> None:
    steps = steps_of()[:25]
    ended = list(read(write_run(tmp_path, steps, report=None)))
    assert odd(ended) == [("end", "problem")]
    assert "the last step written is 24" in ended[0].text
    assert main(["doctor", str(tmp_path)]) == 1
    stopped = list(read(write_run(tmp_path, steps, report=None, seconds_ago=5)))
    assert odd(stopped) == [("end", "problem")]  # a moment ago, and nothing holds its folder
    assert "a signal (Ctrl-C) may have ended it" in (stopped[0].remedy or "")
    with lease.hold((tmp_path,), job=None):
        going = list(read(write_run(tmp_path, steps, report=None, seconds_ago=5)))
    assert odd(going) == []
    assert "may still be going on" in going[0].text


def test_a_run_without_a_step_is_a_problem(tmp_path: Path) -> None:
    found = list(read(write_run(tmp_path, [], report=None, evaluations=())))
    assert odd(found) == [("end", "problem")]
    assert "no step was written" in found[0].text


def test_steps_taken_twice_are_no_fault(tmp_path: Path) -> None:
    steps = steps_of()
    found = {each.subject: each for each in read(write_run(tmp_path, [*steps[:30], *steps[20:]]))}
    assert found["steps"].verdict == "ok"
    assert "10 were taken twice" in found["steps"].text


FAULTS = [
    {
        "round": 0,
        "rank": 1,
        "cause": "its process was ended by SIGKILL: by the kernel if memory ran out (dmesg tells), or by somebody",
        "reason": "its process was ended by SIGKILL: by the kernel if memory ran out (dmesg tells), or by somebody",
        "step": 5,
        "goes_on_at": 4,
        "steps_lost": 1,
        "seconds": 3.25,
    },
    {"time": 2.0, "rank": 0, "step": 7, "fault": "raise", "reason": "Traceback\nRuntimeError: out of memory"},
    {"subject": "odd", "text": None, "verdict": 1},
]


def test_faults_are_told_with_what_they_cost(tmp_path: Path) -> None:
    found = list(read(write_run(tmp_path, steps_of()[:7], report=None, faults=FAULTS)))
    end = next(each for each in found if each.subject == "end")
    assert end.remedy == "see the faults below (faults.jsonl), and what it printed"
    told = [each for each in found if each.subject == "fault"]
    assert [each.verdict for each in told] == ["warning", "problem", "problem"]
    assert told[0].text == (
        "rank 1 in step 5: its process was ended by SIGKILL: by the kernel if memory ran out (dmesg tells), or by "
        "somebody; "
        "went on at step 4, 1 steps lost, 3.2 s until the next was taken"
    )
    assert "dmesg" in (told[0].remedy or "")
    assert told[1].text == "rank 0 in step 7: raise: RuntimeError: out of memory"
    assert "recompute" in (told[1].remedy or "")
    assert told[2].text == "no reason was given"
    assert odd(list(read(write_run(tmp_path, faults=FAULTS[1:2])))) == [("fault", "warning")]


def test_the_samples_of_a_loss_that_is_no_number_are_named(tmp_path: Path) -> None:
    steps = steps_of()
    steps[17]["loss"] = None
    file = tmp_path / "nonfinite-step-17.json"
    file.write_text(json.dumps({"step": 17, "samples": list(range(100, 110))}), encoding="utf-8")
    left_out = [each for each in read(write_run(tmp_path, steps)) if each.verdict != "ok"]
    assert odd(left_out) == [("loss", "warning")]
    named = "not finite at step 17, with samples 100, 101, 102, 103, 104, 105, 106, 107 ..."
    assert left_out[0].text == f"{named}; left out"
    (tmp_path / "report.json").unlink()
    stopped = [each for each in read(write_run(tmp_path, steps, report=None)) if each.subject == "loss"]
    assert [each.text for each in stopped if each.verdict == "problem"] == [named]


def test_an_unfinished_checkpoint_is_found(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step-30.saving").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-20").mkdir()
    found = [each for each in read(write_run(tmp_path)) if each.subject == "checkpoints"]
    assert [each.verdict for each in found] == ["warning"]
    assert "1 unfinished: step-30.saving" in found[0].text
    (tmp_path / "report.json").unlink()
    with lease.hold((tmp_path,), job=None):  # it goes on, and is saving
        os.utime(tmp_path / "metrics.jsonl")
        assert [each for each in read(tmp_path) if each.subject == "checkpoints"] == []


def test_evaluations_that_stay_or_are_no_numbers_are_found(tmp_path: Path) -> None:
    lines = [{"step": step, "accuracy": 0.25, "f1": math.nan} for step in (10, 20, 30)]
    found = [each.text for each in read(write_run(tmp_path, evaluations=lines)) if each.verdict == "warning"]
    assert found == ["accuracy is 0.25 in all 3 evaluations", "f1 is not finite at step 10"]


def test_cut_and_foreign_lines_are_no_reason_to_fail(tmp_path: Path) -> None:
    write_run(tmp_path, report=None, faults=[{}], evaluations=[{}])
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'[1, 2]\n"text"\n\xff\xfe\n{"step": "x", "loss": "y", "step_seconds": [1]}\n{"step": 40, "lo')
    (tmp_path / "report.json").write_text('{"steps": ', encoding="utf-8")
    found = list(read(tmp_path))
    subjects = odd(found)
    assert ("end", "problem") in subjects
    assert any("line 41, 42, 43, 45 can't be read" in each.text for each in found)
    assert any("not finite at step x" in each.text for each in found)


def test_every_check_gets_along_with_nothing(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text("{}", encoding="utf-8")
    assert odd(list(read(tmp_path))) == []
    assert len(CHECKS) == 12
