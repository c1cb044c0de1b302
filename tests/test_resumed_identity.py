"""A resume is of the same data and the same code: other data are refused, other code is told."""

import importlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small_tasks import Unscored
from torch import nn
from unsafe import rewrite_info

import samestep
from samestep import CheckpointError
from samestep.checkpoint.info import read_info
from samestep.cli.main import main
from samestep.tasks.registry import _folder_on_path

TASK = """
from pathlib import Path

import torch
from torch import nn

import samestep
from own_nets import make


class Table(samestep.Task):
    def __init__(self, *, file: str, held_out: str | None = None) -> None:
        self.file, self.held_out_file = file, held_out

    def model(self) -> nn.Module:
        return make()

    def _rows(self, file):
        lines = Path(file).read_text().split()
        numbers = [[float(word) for word in line.split(",")] for line in lines]
        return [(torch.tensor(row[:2]), int(row[2])) for row in numbers]

    def train_set(self):
        return self._rows(self.file)

    def eval_set(self):
        return self._rows(self.held_out_file) if self.held_out_file else None

    def loss(self, output, batch):
        return nn.functional.cross_entropy(output, batch.targets, reduction="sum"), len(output)


class OfSection(Table):
    def __init__(self, *, data) -> None:
        super().__init__(file=data["source"])
"""
NETS = """
from torch import nn

def make():
    return nn.Sequential(nn.Linear(2, 8), nn.GELU(), nn.Linear(8, 2))
"""
LINES = [f"{index % 17},{index * 7 % 23},{index % 2}" for index in range(200)]
JOB = """
recipe:
  task: task.py:Table
  args: {file: FOLDER/train.csv, held_out: FOLDER/held_out.csv}
  batch: 20
  steps: 4
run: {threads: 1, log: [], check: false, folder: FOLDER/run, checkpoint: {every: 2}}
"""


def write(folder: Path) -> Path:
    """A job with its task and its data; the job's file."""
    folder.mkdir(parents=True)
    files = {"task.py": TASK, "own_nets.py": NETS, "job.yaml": JOB.replace("FOLDER", str(folder))}
    for name, text in {**files, "train.csv": "\n".join(LINES), "held_out.csv": "\n".join(LINES[:30])}.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder / "job.yaml"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a job that was trained."""
    job = write(tmp_path_factory.mktemp("identity") / "job")
    sys.modules.pop("own_nets", None)
    assert main(["train", str(job)]) == 0
    return job.parent


@pytest.fixture
def job(trained: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy of it in another folder, to be changed; its task is imported again."""
    folder = Path(shutil.copytree(trained, tmp_path / "moved"))
    (folder / "job.yaml").write_text(JOB.replace("FOLDER", str(folder)), encoding="utf-8")
    sys.modules.pop("own_nets", None)
    yield folder / "job.yaml"
    sys.modules.pop("own_nets", None)


def resume(job: Path, *words: str) -> int:
    return main(["train", str(job), "--resume", "--set", "recipe.steps=5", *words])


def change(file: Path, edit: Callable[[list[str]], list[str]]) -> None:
    file.write_text("\n".join(edit(file.read_text(encoding="utf-8").split())), encoding="utf-8")


def one_line(lines: list[str]) -> list[str]:
    return [*lines[:101], "3,3,1", *lines[102:]]


DATA: dict[str, tuple[str, Callable[[list[str]], list[str]], str]] = {
    "values": ("train", lambda lines: ["1" + line for line in lines], "of other contents (in part 0)"),
    "sorted": ("train", sorted, "of other contents (in part 0, part 1)"),
    "fewer": ("train", lambda lines: lines[40:], "the training set has 160 samples, and had 200"),
    "labels": ("train", lambda lines: [line[:-1] + str(1 - int(line[-1])) for line in lines], "(in part 1)"),
    "one line": ("train", one_line, "the training set has 200 samples as before, of other contents"),
    "one more": ("train", lambda lines: [*lines, lines[0]], "the training set has 201 samples, and had 200"),
    "columns": (
        "train",
        lambda lines: [",".join([*line.split(",")[1::-1], line[-1]]) for line in lines],
        "(in part 0)",
    ),
    "held out": (
        "held_out",
        lambda lines: lines[::-1],
        "the held-out set has 30 samples as before, of other contents",
    ),
}


FAST = ("values", "fewer", "labels", "columns", "held out")  # the others change contents or the number as well


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in DATA]
)
def test_other_data_are_refused_and_can_be_accepted(job: Path, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    file, edit, said = DATA[name]
    change(job.parent / f"{file}.csv", edit)
    assert resume(job) == 2
    (told,) = capfd.readouterr().err.splitlines()
    assert said in told
    key = "file" if file == "train" else file
    assert f"recipe.args.{key} has other contents" in told
    assert "run.checkpoint.accept_data: true (--accept-data-change)" in told
    # What the message advises helps, once: the next checkpoint is of the new data.
    assert resume(job, "--accept-data-change") == 0
    assert "the training goes on with them" in capfd.readouterr().err
    assert read_info(job.parent / "run" / "checkpoints" / "step-5").step == 5
    assert resume(job) == 0
    assert "contents" not in capfd.readouterr().err


def test_the_key_accepts_as_the_option_does(job: Path) -> None:
    change(job.parent / "train.csv", one_line)
    assert resume(job, "--set", "run.checkpoint.accept_data=true") == 0


def test_without_a_resume_there_is_nothing_to_accept(job: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(job), "--accept-data-change", "--folder", str(job.parent / "new")]) == 2
    assert "--accept-data-change goes with --resume" in capfd.readouterr().err


def test_the_same_data_and_code_in_another_folder_are_no_change(job: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for file in job.parent.glob("*.*"):  # neither are other times of the files
        file.touch()
    assert resume(job) == 0
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("samestep:")]
    assert [line for line in lines if "recipe.steps" not in line and "goes on from" not in line] == []


def test_another_file_of_the_same_contents_is_the_same_source(job: Path, capfd: pytest.CaptureFixture[str]) -> None:
    shutil.move(job.parent / "train.csv", job.parent / "renamed.csv")
    job.write_text(job.read_text(encoding="utf-8").replace("train.csv", "renamed.csv"), encoding="utf-8")
    assert resume(job) == 0
    assert "recipe.args" not in capfd.readouterr().err


@pytest.mark.parametrize("row", ["0,0,0", "1,0,0"])
def test_a_file_that_is_written_otherwise_may_be_moved_if_its_samples_are_the_same(
    row: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    job = write(tmp_path / "job")
    text = job.read_text(encoding="utf-8").replace("Table", "OfSection")
    start, end = text.index("  args:"), text.index("  batch:")
    for name in ("train.csv", "moved.csv"):
        job.write_text(f"{text[:start]}  data: {{source: {job.parent / name}}}\n{text[end:]}", encoding="utf-8")
        if name == "train.csv":
            assert main(["train", str(job)]) == 0
    (job.parent / "moved.csv").write_bytes("\r\n".join([row, *LINES[1:]]).encode())
    capfd.readouterr()
    assert resume(job) == (0 if row.startswith("0") else 2)
    told = capfd.readouterr().err
    assert "recipe.data.source is" not in told
    assert ("of other contents" in told) == row.startswith("1")


def test_a_task_file_of_another_name_is_the_same_task_if_its_code_is(
    job: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.move(job.parent / "task.py", job.parent / "renamed.py")
    job.write_text(job.read_text(encoding="utf-8").replace("task.py:", "renamed.py:"), encoding="utf-8")
    assert resume(job) == 0
    assert "recipe.task" not in capfd.readouterr().err
    change = (job.parent / "renamed.py").read_text(encoding="utf-8").replace("cross_entropy(", "cross_entropy(1 * ")
    (job.parent / "third.py").write_text(change, encoding="utf-8")
    job.write_text(job.read_text(encoding="utf-8").replace("renamed.py:", "third.py:"), encoding="utf-8")
    assert resume(job, "--set", "recipe.steps=6") == 2
    assert "the checkpoint is of another training: recipe.task is " in capfd.readouterr().err


CODE = {
    "the loss doubled": ("task.py", "return nn.functional.cross_entropy", "return 2 * nn.functional.cross_entropy"),
    "another activation": ("own_nets.py", "GELU", "ReLU"),
}


@pytest.mark.parametrize("name", CODE)
def test_other_code_is_told_in_a_line(job: Path, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    name, old, new = CODE[name]
    file = job.parent / name
    file.write_text(file.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")
    assert resume(job) == 0
    (told,) = [line for line in capfd.readouterr().err.splitlines() if "the code has changed" in line]
    assert f"in {name};" in told


def test_a_checkpoint_that_says_nothing_of_them_is_compared_by_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    job = write(tmp_path / "job")
    sys.modules.pop("own_nets", None)
    assert main(["train", str(job)]) == 0
    for folder in (job.parent / "run" / "checkpoints").iterdir():
        rewrite_info(folder, lambda values: values.update(identity=None))
    change(job.parent / "train.csv", one_line)
    assert resume(job) == 0
    told = [line for line in capfd.readouterr().err.splitlines() if "doesn't say which data and code" in line]
    assert len(told) == 1


def test_inspect_shows_them(job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "inspect", str(job.parent / "run"), "--json", str(tmp_path / "found.json")]) == 0
    shown = capsys.readouterr().out
    assert "200 samples, of 200" in shown
    assert "task.py" in shown
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))["info"]["identity"]
    assert found["train"]["samples"] == 200
    assert set(found["code"]) == {"task.py", "own_nets.py"}
    assert set(found["sources"]) == {"args.file", "args.held_out"}


def test_evaluate_takes_other_data(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(job.parent / "held_out.csv", one_line)
    change(job.parent / "train.csv", sorted)
    assert main(["evaluate", str(job), "--checkpoint", str(job.parent / "run")]) in (0, 2)
    assert "data are not those" not in capsys.readouterr().err


def test_data_that_are_drawn_at_random_are_no_change(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    class Noisy(Unscored):
        def train_set(self) -> Any:
            pairs = self.pairs

            class Rows:
                def __len__(self) -> int:
                    return len(pairs)

                def __getitem__(self, index: int) -> Any:
                    return pairs[index][0] + torch.randn(4), pairs[index][1]

            return Rows()

    def train(**checkpoint: Any) -> samestep.TrainResult:
        recipe = samestep.Recipe(task=Noisy(samples=20), batch=10, steps=2)
        return samestep.train(recipe, folder=tmp_path / "run", threads=1, check=False, log=(), checkpoint=checkpoint)

    whole = samestep.train(
        samestep.Recipe(task=Noisy(samples=20), batch=10, steps=2),
        folder=tmp_path / "whole",
        threads=1,
        check=False,
        log=(),
    )
    assert train(every=1).losses == whole.losses  # the look has drawn nothing
    identity = read_info(tmp_path / "run" / "checkpoints" / "step-2").identity
    assert identity is not None
    assert identity.train.drawn == ("0",)
    train(resume="auto")
    assert "contents" not in capfd.readouterr().err


# -- a loop of one's own


def net() -> nn.Module:
    return nn.Linear(4, 3)


def loop(folder: Path, samples: Any, *, loss: Any, stop: int, **resume: Any) -> int:
    task = Unscored()
    torch.manual_seed(3)
    model = net()
    with samestep.session("single", threads=1) as session:
        model, _ = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        resumed = session.resume(folder, **resume)
        for batch in session.batches(samples, batch=10, collate=task.collate, start=resumed.step, steps=stop):
            session.step(batch, loss)
            session.save(folder, step=batch.step + 1)
    return resumed.step


def test_a_loop_of_ones_own_is_held_to_its_data(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    task = Unscored(samples=40)
    loop(tmp_path, task.pairs, loss=task.loss, stop=2)
    with pytest.raises(CheckpointError, match=r"has 30 samples, and had 40; .*accept_data=True"):
        loop(tmp_path, task.pairs[:30], loss=task.loss, stop=3)
    changed = [(points + 1, label) for points, label in task.pairs]
    with pytest.raises(CheckpointError, match="of other contents"):
        loop(tmp_path, changed, loss=task.loss, stop=3)
    capfd.readouterr()
    assert loop(tmp_path, task.pairs, loss=task.loss, stop=3) == 2
    assert capfd.readouterr().err == ""
    assert loop(tmp_path, changed, loss=task.loss, stop=4, accept_data=True) == 3
    assert "the training goes on with them" in capfd.readouterr().err
    assert loop(tmp_path, changed, loss=task.loss, stop=5) == 4


def test_a_loop_of_ones_own_is_told_of_other_code(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "own_loss.py"
    task = Unscored(samples=40)
    text = "def loss(output, batch):\n    return FACTOR * (output ** 2).sum(), len(output)\nFACTOR = 1\n"
    for step, (factor, lines) in enumerate(((1, 0), (1, 0), (2, 1)), start=1):
        file.write_text(text.replace("FACTOR = 1", f"FACTOR = {factor}"), encoding="utf-8")
        sys.modules.pop("own_loss", None)
        with _folder_on_path(file):
            own_loss = importlib.import_module("own_loss")
        loop(tmp_path / "saved", task.pairs, loss=own_loss.loss, stop=step)
        assert capfd.readouterr().err.count("own_loss.py") == lines
    sys.modules.pop("own_loss", None)
