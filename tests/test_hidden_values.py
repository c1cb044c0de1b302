"""What ${NAME} in a job file holds may be a secret: messages, configurations and records have its name."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from samestep import jobfile, subprocess_group
from samestep.cli.main import main
from samestep.comparison.results import explain
from samestep.drill.drill import Runs
from samestep.handwritten import FAILED, REFUSED
from samestep.job import Checkpointing
from samestep.subprocess_group import CommandOutcome
from samestep.tuning.tune import TrialError, _Trials
from samestep.variables import Expanded, hide_from_messages, without_values

SECRET = "s3cr3t \"ü'\\/+&%"
SHORT = "q7"  # too short to be looked for in messages


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("SECRET", SECRET)
    monkeypatch.setenv("SHORT", SHORT)
    yield
    hide_from_messages({})


def job_with(key: str, value: Any, folder: Path) -> Path:
    """A job file in which one key has a value."""
    task = Path(__file__).parent / "small_tasks.py"
    job: dict[str, Any] = {
        "recipe": {"task": f"{task}:Points", "batch": 10, "steps": 1},
        "run": {"device": "cpu", "threads": 1, "folder": str(folder / "run"), "check": False, "log": ()},
    }
    *sections, last = key.split(".")
    place = job
    for section in sections:
        place = place.setdefault(section, {})
    place[last] = value
    file = folder / "job.yaml"
    file.write_text(yaml.safe_dump(job), encoding="utf-8")
    return file


def holds(text: str, value: str = SECRET) -> list[str]:
    """In which forms a text has the value."""
    forms = [value, repr(value)[1:-1], json.dumps(value)[1:-1], value.partition(" ")[0]]
    return [form for form in forms if form in text]


WRONG: dict[str, Any] = {
    "recipe": "${SECRET}",
    "run": ["${SECRET}"],
    "recipe.batch": "${SECRET}",
    "recipe.steps": "1${SECRET}",
    "recipe.seed": ["${SECRET}"],
    "recipe.clip": {"a": "${SECRET}"},
    "recipe.optimizer": "${SECRET}",
    "recipe.optimizer.lr": "${SECRET}",
    "recipe.optimizer.name": "${SECRET}",
    "recipe.groups": [{"match": "x", "lr": "${SECRET}"}],
    "recipe.schedule.decay": "${SECRET}",
    "recipe.precision": "${SECRET}",
    "recipe.task": "${SECRET}",
    "recipe.args": ["postgres://u:${SECRET}@h"],
    "recipe.args.samples": "${SECRET}",
    "recipe.args.unknown": [{"a": "${SECRET}"}],
    "run.layout": "${SECRET}",
    "run.engine": "${SECRET}",
    "run.device": "${SECRET}",
    "run.threads": "postgres://u:${SECRET}@h",
    "run.hang_limit": "${SECRET}",
    "run.grace_period": "${SECRET}",
    "run.workers": "${SECRET}",
    "run.transport": "${SECRET}",
    "run.log": "${SECRET}",
    "run.engine_config": "${SECRET}",
    "run.offload_folder": "/none/${SECRET}",
    "run.checkpoint": "${SECRET}",
    "run.checkpoint.every": "${SECRET}",
    "run.checkpoint.resume": "${SECRET}",
}


@pytest.mark.quick
@pytest.mark.parametrize("key", WRONG)
def test_a_message_has_the_name(key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(job_with(key, WRONG[key], tmp_path))]) == 2
    out, error = capsys.readouterr()
    assert "${SECRET}" in error or "unknown key" in error
    assert holds(out + error) == []


@pytest.mark.quick
@pytest.mark.parametrize(
    "key", ["recipe.batch", "run.hang_limit", "run.checkpoint", "recipe.precision", "run.threads"]
)
def test_a_value_of_two_characters_too(key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(job_with(key, "${SHORT}", tmp_path))]) == 2
    assert SHORT not in capsys.readouterr().err.replace(str(tmp_path), "")


@pytest.mark.quick
@pytest.mark.parametrize("key", ["recipe.batch", "run.layout", "recipe.optimizer"])
def test_a_message_about_an_option_has_the_name(key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = job_with("recipe.seed", 1, tmp_path)
    assert main(["train", str(file), "--set", f"{key}=${{SECRET}}"]) == 2
    out, error = capsys.readouterr()
    assert "${SECRET}" in error
    assert holds(out + error) == []


@pytest.mark.quick
def test_the_configuration_that_is_printed_has_the_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for key in ("recipe.args.samples", "run.folder", "recipe.precision"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SECRET", "fp32" if key == "recipe.precision" else SECRET)
            assert main(["train", str(job_with(key, "${SECRET}", tmp_path)), "--print-config"]) == 0
        out, error = capsys.readouterr()
        assert "${SECRET}" in out, key
        assert holds(out + error) == []


@pytest.mark.quick
def test_a_message_that_a_task_raises_has_the_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Texts that a program makes of the value: in another text, cut into lines, quoted."""
    hide_from_messages(
        {SECRET: "${SECRET}", f"db://{SECRET}@h": "db://${SECRET}@h", "-----BEGIN\nline one\n": "${PEM}"}
    )
    for text in (SECRET, repr([SECRET]), json.dumps({"a": SECRET}), f"x{SECRET}x", f"can't reach db://{SECRET}@h"):
        assert holds(without_values(text)) == []
        assert "${SECRET}" in without_values(text)
    assert without_values("the key line one is no key") == "the key ${PEM} is no key"
    hide_from_messages({"4": "${RANKS}", "adam": "${NAME}"})
    assert without_values("layout dp4 of adamw, adam and 4") == "layout dp4 of adamw, ${NAME} and 4"
    hide_from_messages({"true": "${SHOWN}", "1024": "${STEPS}", "12345678": "${PIN}"})
    assert without_values("true or false, at most 1024: 12345678") == "true or false, at most 1024: ${PIN}"


@pytest.mark.quick
def test_texts_that_the_checks_made_plain_are_as_they_were_written(tmp_path: Path) -> None:
    task = Path(__file__).parent / "small_tasks.py"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SECRET", str(task))
        job = jobfile.load(job_with("recipe.task", "${SECRET}:Points", tmp_path)).job
    assert job.recipe.task == f"{task}:Points"
    assert isinstance(job.recipe.task, Expanded)
    assert jobfile.plain(job.recipe, written=True)["task"] == "${SECRET}:Points"
    assert str(task) not in repr(job)


@pytest.mark.quick
def test_a_job_file_that_is_written_for_a_run_has_the_names_and_is_the_same_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PART", "first-of-two")
    given, elsewhere = tmp_path / "given", tmp_path / "elsewhere"
    (given / "data").mkdir(parents=True)
    elsewhere.mkdir()
    (given / "data" / "first-of-two.csv").touch()
    text = """
recipe:
  task: text-classification
  data: {source: "data/${PART}.csv"}
  args: {note: "${SECRET}", several: ["a ${SECRET} b", 5], plain: "no ${"}
  optimizer: {lr: 2.0e-3}
run: {folder: "runs/${SECRET}", inject: {rank: 0, step: 1, fault: kill, seconds: 1m}}
"""
    (given / "job.yaml").write_text(text, encoding="utf-8")
    job = jobfile.load(given / "job.yaml").job
    written = jobfile.to_run(job)
    assert holds(written) == []
    assert "first-of-two" not in written
    (elsewhere / "other.yaml").write_text(written, encoding="utf-8")
    read = jobfile.load(elsewhere / "other.yaml").job
    assert read == job
    assert read.recipe.args["several"] == [f"a {SECRET} b", 5]


@pytest.mark.quick
def test_tune_and_drill_write_the_names_into_the_job_files_of_their_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = jobfile.load(job_with("recipe.args.note", "${SECRET}", tmp_path)).job
    job = replace(job, run=replace(job.run, checkpoint=Checkpointing()))
    monkeypatch.setattr(subprocess_group, "run", lambda *_, **__: CommandOutcome(code=1, seconds=1.0, output=""))
    (tmp_path / "tune").mkdir()
    (tmp_path / "drill").mkdir()
    with pytest.raises(TrialError):
        _Trials(tmp_path / "tune", 3, 10.0).seconds(job, {})
    Runs(job=job, place=tmp_path / "drill", time_limit=10.0, step=1, rank=0).train("run")
    files = [tmp_path / "tune/1/job.yaml", tmp_path / "drill/run.yaml"]
    for file in files:
        text = file.read_text(encoding="utf-8")
        assert "${SECRET}" in text
        assert holds(text) == []


@pytest.mark.quick
def test_what_a_run_of_another_process_printed_has_the_name(tmp_path: Path) -> None:
    """The runs of compare, tune and drill, which are given the values."""
    hide_from_messages({SECRET: "${SECRET}"})
    text = f"samestep: recipe.args.note is {SECRET}; it should be short\n"
    outcome = CommandOutcome(code=2, seconds=1.0, output=text)
    assert holds(outcome.output + "".join(outcome.remarks)) == []
    assert explain(tmp_path, outcome, 1.0) == ("refused", "recipe.args.note is ${SECRET}; it should be short")
    (tmp_path / REFUSED).write_text(text, encoding="utf-8")
    assert holds(explain(tmp_path, outcome, 1.0)[1]) == []
    (tmp_path / REFUSED).unlink()
    (tmp_path / f"{FAILED}0").write_text(f"ValueError: {SECRET!r}", encoding="utf-8")
    assert explain(tmp_path, CommandOutcome(code=1, seconds=1.0, output=""), 1.0)[1] == "ValueError: '${SECRET}'"


NOTED = """
from small_tasks import Points


class Noted(Points):
    def __init__(self, note: str, several: tuple[str, ...], fails: bool = False) -> None:
        super().__init__(samples=20)
        self.note, self.fails = note, fails

    def loss(self, output, batch):
        if self.fails:
            raise RuntimeError(f"can't reach {self.note}")
        return super().loss(output, batch)
"""


@pytest.mark.parametrize("fails", [False, True])
def test_no_file_of_a_run_has_the_value(fails: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "noted.py").write_text(NOTED, encoding="utf-8")
    values = {"note": "u:${SECRET}@h", "several": ["${SECRET}"], "fails": fails}
    file = job_with("recipe.args", values, tmp_path)
    words = [
        f"recipe.task={tmp_path}/noted.py:Noted",
        "run.checkpoint={every: 1}",
        f"run.layout={'dp2' if fails else 'single'}",
    ]
    assert main(["train", str(file), *(word for each in words for word in ("--set", each))]) == int(fails)
    out, error = capfd.readouterr()
    assert holds(out + error) == []
    assert ("can't reach u:${SECRET}@h" in error) == fails
    saved = {path: path.read_bytes().decode(errors="ignore") for path in tmp_path.rglob("*") if path.is_file()}
    assert [path for path, text in saved.items() if holds(text)] == []
    if not fails:
        info = next(text for path, text in saved.items() if path.name == "checkpoint.json")
        assert "${SECRET}" in info
