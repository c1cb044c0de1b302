"""Tuning: what is tried, what is kept, what a failure is, and what is written."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from small_jobs import job_file
from small_tasks import Points

import samestep
from samestep import jobfile
from samestep.cli.main import main
from samestep.job import Job, Run
from samestep.tuning.results import TuningResult, TuningRow, print_tuned
from samestep.tuning.settings import SETTINGS, Setting, SettingCandidate
from samestep.tuning.tune import TrialError, greedy, tune_job

pytestmark = pytest.mark.timeout(120)

MISSING = SettingCandidate(value="jemalloc", missing="libjemalloc is not installed")
LOADED = SettingCandidate(value="tcmalloc", environment={"LD_PRELOAD": "libtcmalloc.so"})


def job(layout: str = "dp2", **run: Any) -> Job:
    recipe = samestep.Recipe(task=Points(), batch=16, steps=10)
    return Job(recipe=recipe, run=Run(layout=layout, device="cpu", threads=1, **run))


def seconds_of(job: Job, variables: Mapping[str, str]) -> float:
    """A machine on which micro-batches of 4 halve the time, tcmalloc takes 0.8 of it, bf16 0.7; nothing compiles."""
    if job.run.compile:
        raise TrialError("failed", "no C++ compiler")
    half = 0.5 if job.run.micro_batch == 4 else 1.0
    return half * (0.8 if variables else 1.0) * (0.7 if job.recipe.precision == "bf16" else 1.0)


def settings(*names: str) -> list[Setting]:
    return [setting for setting in SETTINGS if setting.name in names]


def rows_of(found: TuningResult) -> dict[tuple[str, str], TuningRow]:
    return {(row.setting, row.value): row for row in found.rows}


def test_the_best_of_each_setting_is_kept_before_the_next_is_tried() -> None:
    allocator = Setting(name="allocator", candidates=lambda job, layout: [MISSING, LOADED])
    found = greedy(job(), [*settings("precision", "micro_batch", "compile"), allocator], seconds_of, repeats=2)
    rows = rows_of(found)
    assert found.run == {"layout": "dp2", "micro_batch": 4}
    assert found.environment == {"LD_PRELOAD": "libtcmalloc.so"}
    assert rows["micro_batch", "4"].status == "kept"
    assert rows["micro_batch", "4"].worth == pytest.approx(2)
    assert rows["micro_batch", "2"].status == "not better"
    assert rows["compile", "true"].status == "failed"
    assert rows["compile", "true"].reason == "no C++ compiler"
    assert rows["allocator", "jemalloc"].reason == "libjemalloc is not installed"
    assert rows["allocator", "tcmalloc"].worth == pytest.approx(1 / 0.8)
    assert found.at_first.seconds == pytest.approx(1)
    assert found.at_last.seconds == pytest.approx(0.4)
    # bfloat16 rounds otherwise: it is tried on top of what was kept, and is not kept itself.
    assert found.rows[-1].setting == "precision"
    assert found.rows[-1].status == "changes the result"
    assert found.rows[-1].worth == pytest.approx(1 / 0.7)
    assert found.job.recipe.precision == "fp32"
    assert json.loads(json.dumps(found.to_json()))["run"] == found.run


def test_a_gain_below_the_noise_is_not_kept(capsys: pytest.CaptureFixture[str]) -> None:
    def noisy() -> Callable[[Job, Mapping[str, str]], float]:
        taken: dict[int | None, int] = {}

        def measure(job: Job, variables: Mapping[str, str]) -> float:
            turn = taken[job.run.micro_batch] = taken.get(job.run.micro_batch, 0) + 1
            return (0.9 if job.run.micro_batch == 4 else 1.0) * (1.0, 1.3, 0.7)[turn % 3]

        return measure

    found = greedy(job(), settings("micro_batch"), noisy(), repeats=3)
    assert {row.status for row in found.rows} == {"not better"}
    assert found.run == {"layout": "dp2"}
    assert found.rows[0].noise == pytest.approx(0.3)
    print_tuned(found)
    assert "no value is faster; a step takes 1000.0 ms\n" in capsys.readouterr().out


def test_what_trials_said_is_passed_on(capsys: pytest.CaptureFixture[str]) -> None:
    found = replace(greedy(job(), settings("micro_batch"), seconds_of, repeats=1), remarks=("all through gloo",))
    print_tuned(found)
    assert "all through gloo" in capsys.readouterr().out.splitlines()
    assert found.to_json()["remarks"] == ["all through gloo"]


def test_the_repeats_are_taken_in_turns() -> None:
    order: list[int | None] = []

    def measure(job: Job, variables: Mapping[str, str]) -> float:
        order.append(job.run.micro_batch)
        return 1.0

    greedy(job(), settings("micro_batch"), measure, repeats=2)
    assert order == [None, 4, 2, 4, 2, None]


def test_what_a_layout_cannot_have_is_a_row_with_its_reason() -> None:
    found = greedy(job("fsdp2"), settings("bucket_mb"), seconds_of, repeats=1, task=Points())
    assert {row.status for row in found.rows} == {"refused"}
    assert found.rows[0].reason is not None
    assert "only replicas send gradients in such buckets" in found.rows[0].reason
    assert found.at_first == found.at_last


def test_a_job_that_fails_as_it_is_is_no_row() -> None:
    with pytest.raises(samestep.RankFailedError, match="no C\\+\\+ compiler"):
        greedy(job(compile=True), settings("micro_batch"), seconds_of, repeats=1)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
@pytest.mark.parametrize("layout", ["single", "dp2", "pp2"])
def test_values_change_what_they_name_and_nothing_else(setting: Setting, layout: str) -> None:
    given = job(layout)
    for candidate in setting.candidates(given, samestep.Layout.parse(layout)):
        changed = candidate.of(given)
        assert changed != given or candidate.environment or candidate.missing
        assert (changed.recipe == given.recipe) == setting.keeps_result
        assert set(candidate.run) <= {setting.name}
        assert replace(changed.run, **{key: getattr(given.run, key) for key in candidate.run}) == given.run


@pytest.mark.slow
def test_the_command_tries_writes_and_tells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = job_file(tmp_path, run={"micro_batch": 5})
    written, told = tmp_path / "tuned.yaml", tmp_path / "tuned.json"
    words = ["--settings", "micro_batch", "--steps", "5", "--repeats", "1"]
    assert main(["tune", str(file), *words, "--json", str(told), "--write", str(written), "--force"]) == 0
    out = capsys.readouterr().out
    assert "times as fast" in out
    values = json.loads(told.read_text(encoding="utf-8"))
    assert [row["value"] for row in values["rows"]] == ["10", "3"]
    assert all(row["seconds"] > 0 and row["before_seconds"] > 0 for row in values["rows"])
    kept = [row["value"] for row in values["rows"] if row["status"] == "kept"]
    assert values["run"] == {"layout": "single", **({"micro_batch": int(kept[0])} if kept else {})}
    assert yaml.safe_load(out[out.index("run:") :])["run"] == values["run"]
    again = jobfile.load(written).job
    assert again.run.micro_batch == values["run"].get("micro_batch", 5)
    assert again.recipe == jobfile.load(file).job.recipe


WRONG = {
    "a setting": (["--settings", "threds"], 'settings: there is no "threds" to try; did you mean "threads"?'),
    "no setting": (["--settings", ","], "settings names none; known: transport, threads"),
    "too few steps": (["--steps", "3"], "steps is 3, and the first 3 of a trial are not timed; use 4 or more"),
    "no repeats": (["--repeats", "0"], 'argument --repeats: "0" is out of range; use a whole number from 1 to 1,000'),
    "no time": (["--time-limit", "0"], '--time-limit: "0" is no time; use seconds above 0'),
    "a folder": (["--write", "."], "--write .: this is a folder; the path of a file is wanted"),
}


@pytest.mark.parametrize("case", WRONG)
def test_bad_input_is_one_sentence(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words, said = WRONG[case]
    assert main(["tune", str(job_file(tmp_path)), *words]) == 2
    assert said in capsys.readouterr().err


def test_a_task_object_is_refused() -> None:
    with pytest.raises(samestep.UserError, match="tune starts each trial as a command"):
        tune_job(job())
