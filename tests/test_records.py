"""What a training leaves behind: the steps, the report, the weights, TensorBoard's events; and what it prints."""

import contextlib
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from heavy_task import RANK_1, STARTER
from safetensors.torch import load_file
from scored_task import Scored
from small_tasks import Points, Unscored
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

import samestep
from samestep.cli.main import main
from samestep.training.metrics_log import Records

TESTS = Path(__file__).parent

# 77 samples in batches of 32: an epoch has steps of 32, 32 and 13; a rank takes 16, 16, and 7 or 6.
JOB = f"""
recipe:
  task: {TESTS}/heavy_task.py:Heavy
  batch: 32
  epochs: 2
  evaluation: {{batch: 8, every: 4}}
run: {{layout: dp2, device: cpu, rank_lines: true}}
"""


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A run of the command line on two ranks, none of whose streams was a terminal."""

    place: Path
    folder: Path
    stdout: str
    stderr: str

    def lines(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / name).read_text(encoding="utf-8").splitlines()]

    def json(self, name: str) -> dict[str, Any]:
        return json.loads((self.folder / name).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    place = tmp_path_factory.mktemp("place")
    (place / "small.yaml").write_text(JOB, encoding="utf-8")
    command = [sys.executable, "-m", "samestep", "train", "small.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False, cwd=place)
    assert done.returncode == 0, done.stderr
    return Finished(place=place, folder=place / "runs" / "small", stdout=done.stdout, stderr=done.stderr)


def test_every_step_has_its_line(run: Finished) -> None:
    steps = run.lines("metrics.jsonl")
    keys = {"step", "epoch", "loss", "grad_norm", "lr", "samples", "step_seconds", "data_seconds"}
    assert all(line.keys() == keys for line in steps)
    assert [(line["step"], line["epoch"], line["samples"]) for line in steps] == [
        (0, 0, 32),
        (1, 0, 32),
        (2, 0, 13),
        (3, 1, 32),
        (4, 1, 32),
        (5, 1, 13),
    ]
    assert all(line["step_seconds"] > 0 and line["data_seconds"] > 0 for line in steps)


def test_the_report_says_how_it_went(run: Finished) -> None:
    report, steps = run.json("report.json"), run.lines("metrics.jsonl")
    known = {name: report[name] for name in ("layout", "engine", "processes", "device", "steps")}
    assert known == {"layout": "dp2", "engine": "native", "processes": 2, "device": "cpu", "steps": 6}
    assert report["final_loss"] == steps[-1]["loss"]
    assert report["seconds"] == pytest.approx(sum(line["step_seconds"] + line["data_seconds"] for line in steps))
    assert report["samples_per_second"] * report["seconds"] == pytest.approx(2 * 77)
    assert report["metrics"]["accuracy"] == run.lines("evaluations.jsonl")[-1]["accuracy"]
    assert report["versions"]["python"] == platform.python_version()
    assert report["versions"]["samestep"] == samestep.__version__
    assert report["versions"]["torch"].startswith(torch.__version__.partition("+")[0])


def test_curves_have_a_file_of_their_own(run: Finished) -> None:
    metrics = run.json("report.json")["metrics"]
    assert metrics.keys() == {"accuracy", "precision", "recall", "f1", "confusion_matrix", "seen"}
    assert metrics["recall"].keys() == {"class 0", "class 1", "class 2"}
    curves = run.json("curves.json")
    assert curves.keys() == {"curve"}
    assert curves["curve"].keys() == {"precision", "recall", "thresholds"}
    assert curves["curve"]["recall"]["class 0"][0] == 1


def test_the_peak_of_memory_is_each_ranks_own(run: Finished) -> None:
    """Not what the process that started the ranks held, which Linux counts as theirs at first."""
    first, second = run.json("report.json")["peak_memory_bytes"]
    assert 50 << 20 < first < STARTER
    assert first + RANK_1 // 2 < second < STARTER


def test_tensorboard_can_read_its_events(run: Finished) -> None:
    events = EventAccumulator(str(run.folder / "tensorboard")).Reload()
    steps = run.lines("metrics.jsonl")
    for name in ("loss", "grad_norm", "lr"):
        drawn = events.Scalars(f"train/{name}")
        assert [point.step for point in drawn] == [line["step"] for line in steps]
        assert [point.value for point in drawn] == pytest.approx([line[name] for line in steps], rel=1e-6)
    drawn = events.Scalars("evaluation/accuracy")
    evaluations = run.lines("evaluations.jsonl")
    assert [(point.step, point.value) for point in drawn] == [
        (line["step"], pytest.approx(line["accuracy"])) for line in evaluations
    ]
    assert [line["step"] for line in evaluations] == [4, 6]


def test_the_weights_load_into_the_model(run: Finished) -> None:
    model = Scored().model()
    assert model.load_state_dict(load_file(run.folder / "model.safetensors")).missing_keys == []
    points, labels = (torch.stack(parts) for parts in zip(*Scored().held_out, strict=True))
    right = (model.eval()(points).argmax(dim=-1) == labels).float().mean().item()
    assert right == pytest.approx(run.json("report.json")["metrics"]["accuracy"])


def test_a_line_a_rank_adds_up_to_the_data_set(run: Finished) -> None:
    assert run.stdout.splitlines()[:3] == [
        "rank 0: 3 steps of 16 or 7 samples = 39",
        "rank 1: 3 steps of 16 or 6 samples = 38",
        "all ranks: 77 of 77 samples in the first epoch",
    ]


def test_nothing_is_drawn_where_nobody_looks(run: Finished) -> None:
    assert run.stderr == ""
    assert "\x1b" not in run.stdout


def read_to_the_end(terminal: int) -> Iterator[bytes]:
    """What comes out of a pseudo-terminal until nobody has its other end open, which Linux makes an error."""
    with os.fdopen(terminal, "rb", buffering=0) as drawn, contextlib.suppress(OSError):
        while chunk := drawn.read(4096):
            yield chunk


@pytest.mark.slow
def test_the_bar_is_drawn_on_a_terminal(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("recipe: {task: regression, steps: 5}", encoding="utf-8")
    terminal, end = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "samestep", "train", "job.yaml", "--device", "cpu"],
        stdout=subprocess.DEVNULL,
        stderr=end,
        cwd=tmp_path,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "160"},
    )
    os.close(end)
    text = b"".join(read_to_the_end(terminal)).decode("utf-8")
    assert process.wait(timeout=60) == 0
    assert "train single" in text
    assert "5/5" in text
    assert "loss " in text


@pytest.mark.slow
def test_a_second_run_leaves_the_first_as_it_was(
    run: Finished, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {file: file.read_bytes() for file in run.folder.rglob("*") if file.is_file()}
    monkeypatch.chdir(run.place)
    overrides = ["--layout", "single", "--set", "recipe.task=regression", "--set", "run.log=[]"]
    assert main(["train", "small.yaml", *overrides]) == 0
    assert {file: file.read_bytes() for file in run.folder.rglob("*") if file.is_file()} == before
    assert "files: runs/small-2" in capsys.readouterr().out
    second = {file.name for file in (run.place / "runs" / "small-2").iterdir()}
    assert second == {"metrics.jsonl", "evaluations.jsonl", "report.json", "model.safetensors"}


class Slow(Unscored):
    """Waits for each sample, or for each loss."""

    def __init__(self, *, sample_seconds: float = 0.0, loss_seconds: float = 0.0) -> None:
        super().__init__(samples=16)
        self.sample_seconds, self.loss_seconds = sample_seconds, loss_seconds

    def collate(self, samples: Sequence[Any]) -> samestep.Batch:
        time.sleep(self.sample_seconds * len(samples))
        return super().collate(samples)

    def loss(self, output: Tensor, batch: samestep.Batch) -> tuple[Tensor, Tensor | int]:
        time.sleep(self.loss_seconds)
        return super().loss(output, batch)


@pytest.mark.parametrize(
    ("task", "slow", "other"),
    [
        (Slow(sample_seconds=0.05), "data_seconds", "step_seconds"),
        (Slow(loss_seconds=0.2), "step_seconds", "data_seconds"),
    ],
    ids=["data", "step"],
)
def test_waiting_for_data_and_computing_are_told_apart(tmp_path: Path, task: Slow, slow: str, other: str) -> None:
    recipe = samestep.Recipe(task=task, batch=4, epochs=1)
    result = samestep.train(recipe, folder=tmp_path, device="cpu", check=False)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text("utf-8").splitlines()]
    assert [line["samples"] for line in lines] == [4, 4, 4, 4]
    assert min(line[slow] for line in lines) >= 0.2
    assert min(line[other] for line in lines) < min(line[slow] for line in lines)
    assert math.isclose(result.seconds, sum(line[slow] + line[other] for line in lines))


def test_lines_of_steps_before_stand_until_the_new_file_is_whole(tmp_path: Path) -> None:
    """A process that is killed while it begins a file of records again loses none of them."""
    file = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step, "loss": step / 8}) for step in range(40)]
    file.write_text("\n".join([*lines, '{"step": 40, "lo']), encoding="utf-8")
    with file.open(encoding="utf-8") as before, Records(tmp_path, first_step=25, log=()) as records:
        assert before.read().splitlines()[:40] == lines  # not written to in place
        assert records.losses == [step / 8 for step in range(25)]
        records.step({"step": 25, "loss": 1.0, "grad_norm": 0.0, "lr": 0.1})
        assert file.read_text(encoding="utf-8").splitlines()[:25] == lines[:25]
        assert json.loads(file.read_text(encoding="utf-8").splitlines()[25])["loss"] == 1.0
    assert sorted(each.name for each in tmp_path.iterdir()) == ["evaluations.jsonl", "metrics.jsonl"]


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("something", encoding="utf-8")
    recipe = samestep.Recipe(task=Points(), batch=32, steps=1)
    with pytest.raises(samestep.UserError, match=r"run\.folder is .*file/run: .*file is a file"):
        samestep.train(recipe, folder=tmp_path / "file" / "run", device="cpu")
