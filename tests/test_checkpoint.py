"""Saving, going on, and what stands in the way of either."""

import json
import os
import pickle
import random
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from small_tasks import Points
from torch import nn

import samestep
from samestep import CheckpointError, NotSavedError, UserError
from samestep.checkpoint.save import Saver, total_bytes
from samestep.cli.main import main

TESTS = Path(__file__).parent


def recipe(**values: Any) -> samestep.Recipe:
    """20 samples in batches of 6: an epoch has steps of 6, 6, 6 and 2."""
    return samestep.Recipe(
        **{
            "task": Points(samples=20, dropout=0.2),
            "batch": 6,
            "steps": 10,
            "optimizer": samestep.AdamW(lr=0.02),
            "schedule": samestep.Schedule(warmup=3, decay="cosine"),
            "clip": 0.5,
            **values,
        }
    )


def train(folder: Path, layout: str = "single", checkpoint: Any = None, **values: Any) -> samestep.TrainResult:
    return samestep.train(recipe(**values), layout=layout, threads=1, folder=folder, log=(), checkpoint=checkpoint)


def steps_of(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (folder / "checkpoints").iterdir())


@pytest.mark.parametrize("optimizer", [samestep.AdamW(lr=0.02), samestep.SGD(lr=0.1, momentum=0.9), samestep.SGD()])
def test_a_training_goes_on_bit_for_bit(tmp_path: Path, optimizer: Any) -> None:
    whole = train(tmp_path / "whole", optimizer=optimizer)
    saved = train(tmp_path / "saved", checkpoint={"every": 3, "keep": 9}, optimizer=optimizer)
    assert saved.losses == whole.losses
    assert steps_of(saved.folder) == [3, 6, 9, 10]
    for step in (3, 9):
        resumed = train(
            tmp_path / f"resumed-{step}",
            checkpoint={"resume": f"{saved.folder}/checkpoints/step-{step}"},
            optimizer=optimizer,
        )
        assert resumed.first_step == step
        assert resumed.losses == whole.losses[step:]
        assert resumed.metrics == whole.metrics
        weights = load_file(resumed.model_file)
        assert all(torch.equal(weights[name], value) for name, value in load_file(whole.model_file).items())


def test_a_run_that_was_ended_goes_on_in_its_folder_and_its_records_tell_every_step_once(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", evaluation={"every": 2})
    folder = tmp_path / "run"
    train(folder, checkpoint={"every": 4}, steps=6, evaluation={"every": 2})
    shutil.rmtree(folder / "checkpoints" / "step-6")  # as if it had been ended in its sixth step
    with (folder / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 6, "lo')
    result = train(folder, checkpoint={"every": 4, "resume": "auto"}, evaluation={"every": 2})
    assert result.first_step == 4
    assert result.losses[:4] == whole.losses[:4]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(10))
    looks = [json.loads(line)["step"] for line in (folder / "evaluations.jsonl").read_text().splitlines()]
    assert looks == [2, 4, 6, 8, 10]
    report = json.loads((folder / "report.json").read_text())
    assert report["first_step"] == 4
    assert report["steps"] == 10


def test_a_longer_training_goes_on_from_a_finished_one(tmp_path: Path) -> None:
    constant: dict[str, Any] = {"schedule": samestep.Schedule()}
    whole = train(tmp_path / "whole", **constant)
    train(tmp_path / "run", checkpoint={}, steps=5, **constant)
    result = train(tmp_path / "run", checkpoint={"resume": "auto"}, **constant)
    assert result.losses == whole.losses
    again = train(tmp_path / "run", checkpoint={"resume": "auto"}, **constant)  # nothing is left to do
    assert again.losses == whole.losses
    assert again.metrics == whole.metrics


def test_two_ranks_in_one_step_and_one_at_its_end_save_what_stays(tmp_path: Path) -> None:
    result = train(tmp_path / "run", "dp2", checkpoint={"every": 2, "keep": 2})
    assert steps_of(result.folder) == [8, 10]
    info = json.loads((result.folder / "checkpoints" / "step-10" / "checkpoint.json").read_text())
    assert info["step"] == 10
    assert info["epoch"] == 2
    assert info["processes"] == 2
    assert info["recipe"]["batch"] == 6
    assert set(info["files"]) == {".metadata", "__0_0.distcp", "__1_0.distcp"}


def test_the_best_one_stays(tmp_path: Path) -> None:
    result = train(
        tmp_path / "run",
        checkpoint={"every": 1, "keep": 1, "best": "accuracy"},
        evaluation={"every": 1},
        schedule=samestep.Schedule(),
        optimizer=samestep.AdamW(lr=0.3),
    )
    scores = [json.loads(line) for line in (result.folder / "evaluations.jsonl").read_text().splitlines()]
    best = max(scores, key=lambda line: (line["accuracy"], -line["step"]))["step"]
    assert best not in (1, 10), "the test wants a best value in between"
    assert steps_of(result.folder) == [best, 10]


@pytest.mark.slow
def test_a_time_between_checkpoints_is_kept(tmp_path: Path) -> None:
    result = train(tmp_path / "run", checkpoint={"every": "0.2s", "keep": 99}, steps=600)
    seconds = result.seconds + result.checkpoint_seconds
    assert 0.1 * seconds / 0.2 <= len(steps_of(result.folder)) <= 2 + 2 * seconds / 0.2


def test_synchronous_saving_writes_the_same(tmp_path: Path) -> None:
    one = train(tmp_path / "one", checkpoint={"every": 5})
    other = train(tmp_path / "other", checkpoint={"every": 5, "asynchronous": False})
    assert one.losses == other.losses
    resumed = train(tmp_path / "resumed", checkpoint={"resume": str(other.folder / "checkpoints" / "step-5")})
    assert resumed.losses == one.losses[5:]


def test_the_room_that_a_checkpoint_takes_counts_what_its_file_says_of_each_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []
    write = Saver._write

    def watched(self: Saver, pieces: Any, info: Any) -> None:
        counted.append(total_bytes(pieces, self._group))
        write(self, pieces, info)

    monkeypatch.setattr(Saver, "_write", watched)
    folder = train(tmp_path / "run", checkpoint={}).folder
    (file,) = (folder / "checkpoints" / "step-10").glob("*.distcp")
    assert 0.9 * file.stat().st_size <= counted[0] <= file.stat().st_size


# -- what is damaged


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("finished") / "run", checkpoint={"every": 4}).folder


@pytest.fixture
def saved(finished: Path, tmp_path: Path) -> Path:
    """A finished run with checkpoints after 4, 8 and 10 steps, to be changed."""
    return shutil.copytree(finished, tmp_path / "run")


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(bytes(content))


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


@pytest.mark.parametrize("damage", [flip, truncate, Path.unlink])
@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "checkpoint.json"])
def test_a_damaged_checkpoint_is_passed_over(
    saved: Path, damage: Any, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    damage(saved / "checkpoints" / "step-10" / name)
    if damage is flip and name == "checkpoint.json":
        (saved / "checkpoints" / "step-10" / name).write_text("{}")
    result = train(saved, checkpoint={"resume": "auto"})
    assert result.first_step == 8
    if name != "checkpoint.json" or damage is not Path.unlink:  # without it, it is no checkpoint at all
        assert "step-10" in capfd.readouterr().err


def test_a_damaged_checkpoint_that_was_asked_for_is_an_error(saved: Path, tmp_path: Path) -> None:
    flip(saved / "checkpoints" / "step-8" / "__0_0.distcp")
    with pytest.raises(CheckpointError, match=r"step-8 is damaged: .*__0_0.distcp is not what was written"):
        train(tmp_path / "new", checkpoint={"resume": str(saved / "checkpoints" / "step-8")})


def test_where_all_are_damaged_nothing_is_made_up(saved: Path) -> None:
    for path in (saved / "checkpoints").iterdir():
        truncate(path / "__0_0.distcp")
    with pytest.raises(CheckpointError, match=r"all 3 checkpoints in .* are damaged"):
        train(saved, checkpoint={"resume": "auto"})


class Attack:
    """Writes a file as soon as it is unpickled."""

    def __init__(self, target: Path) -> None:
        self._target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._target),)


def test_an_index_that_would_run_code_is_refused(saved: Path, tmp_path: Path) -> None:
    place = saved / "checkpoints" / "step-10"
    (place / ".metadata").write_bytes(pickle.dumps(Attack(tmp_path / "attacked")))
    with pytest.raises(CheckpointError, match="mkdir, which no index needs"):
        train(tmp_path / "new", checkpoint={"resume": str(place)})
    assert not (tmp_path / "attacked").exists()


# -- what can't be written


def test_what_a_killed_run_left_half_done_is_removed(saved: Path) -> None:
    (saved / "checkpoints" / "step-99.saving").mkdir()
    (saved / "checkpoints" / "step-99.saving" / "__0_0.distcp").write_bytes(b"half")
    (saved / "checkpoints" / "step-98.replaced").mkdir()
    others = {"notes.saving", "step-7.replaced", "step-x.saving", "linked", "step-6.saving", "step-5.saving"}
    (saved / "checkpoints" / "notes.saving").mkdir()
    (saved / "checkpoints" / "step-x.saving").mkdir()
    (saved / "checkpoints" / "step-7.replaced").write_text("a file of somebody's", encoding="utf-8")
    (saved / "checkpoints" / "step-5.saving").mkdir()
    (saved / "checkpoints" / "step-5.saving" / "notes.txt").write_text("somebody's", encoding="utf-8")
    (saved / "checkpoints" / "linked").mkdir()
    (saved / "checkpoints" / "step-6.saving").symlink_to("linked")
    assert train(saved, checkpoint={"resume": "auto"}).first_step == 10
    left = {path.name for path in (saved / "checkpoints").iterdir()}
    assert left == others | {"step-4", "step-8", "step-10"}


@pytest.fixture(params=[128])
def small_disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """Of so many KiB."""
    place = tmp_path / "small"
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={request.param}k", "tmpfs", place], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip("a small disk needs the right to mount one")
    yield place
    subprocess.run(["umount", "--lazy", place], check=True)


# Where in a file the disk ends decides how PyTorch's writer tells it.
@pytest.mark.parametrize("small_disk", [16, 40], indirect=True)
def test_a_disk_that_is_too_small_for_the_first_is_told(
    small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("samestep.checkpoint.save.PAUSES", (0.01,))
    monkeypatch.setattr("samestep.file_errors.room", lambda _: None)  # as where what it says is gone by the save
    with pytest.raises(NotSavedError, match=r"step-1\.saving can't be written .*no space is left.*no checkpoint"):
        train(tmp_path / "run", checkpoint={"every": 1, "folder": small_disk, "max_failures": 0})


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_full_disk_is_told_and_what_was_saved_stays(
    small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    monkeypatch.setattr("samestep.checkpoint.save.PAUSES", (0.01,))
    settings = {"every": 1, "keep": 99, "folder": small_disk, "asynchronous": asynchronous, "max_failures": 1}
    with pytest.raises(NotSavedError, match=r"can't be written into .*small by rank 0: .*no space is left"):
        train(tmp_path / "run", checkpoint=settings)
    complete = [path for path in small_disk.iterdir() if path.suffix != ".saving"]
    assert complete
    resumed = train(tmp_path / "new", checkpoint={"resume": str(small_disk)})
    assert resumed.first_step == len(complete)


def test_a_folder_that_may_not_be_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(samestep.UserError, match=r"/proc/samestep can't be written"):
        train(tmp_path / "run", checkpoint={"folder": "/proc/samestep"})


# -- what is another training's, and what can't be meant


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"seed": 1}, "recipe.seed is 1, and was 0"),
        ({"batch": 5}, "recipe.batch is 5, and was 6"),
        ({"optimizer": samestep.SGD()}, "recipe.optimizer.name is sgd, and was adamw"),
        ({"precision": "fp64"}, "of float32, and the job's model has .* of float64"),
    ],
)
def test_another_training_does_not_go_on_from_it(
    saved: Path, tmp_path: Path, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        train(tmp_path / "new", checkpoint={"resume": str(saved)}, **values)


def test_another_model_does_not_go_on_from_it(saved: Path, tmp_path: Path) -> None:
    settings = {"resume": str(saved), "accept_data": True}  # the labels are others, too
    with pytest.raises(CheckpointError, match=r"model.4.weight is \[3, 16\] of float32, .* has \[5, 16\]"):
        train(tmp_path / "new", checkpoint=settings, task=Points(samples=20, classes=5))


def test_a_change_that_may_be_made_is_said(saved: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    train(tmp_path / "new", checkpoint={"resume": str(saved)}, steps=12, clip=2.0)
    assert "recipe.clip is 2.0, and was 0.5; the training goes on with the new value" in capfd.readouterr().err


def test_a_folder_with_checkpoints_is_not_written_over(saved: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds checkpoints of a training, up to step 10; resume: auto"):
        train(saved, checkpoint={"every": 4})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"every": 0}, "run.checkpoint.every"),
        ({"every": "10x"}, "run.checkpoint.every"),
        ({"keep": 0}, "run.checkpoint.keep"),
        ({"best_is": "most"}, "run.checkpoint.best_is"),
        ({"resume": "/nowhere"}, "run.checkpoint.resume is /nowhere: there is no such folder"),
        ({"resume": "{empty}"}, "no checkpoint is"),
        ({"folder": "{file}/below"}, "is a file; use a folder, or a new path"),
        ({"often": 3}, "run.checkpoint.often"),
    ],
)
def test_settings_that_can_not_be_meant(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    filled = {
        key: value.format(empty=tmp_path / "empty", file=tmp_path / "file") if isinstance(value, str) else value
        for key, value in settings.items()
    }
    with pytest.raises(UserError, match=message):
        train(tmp_path / "run", checkpoint=filled)


def test_a_metric_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="best is f2, which the evaluation does not give; use accuracy"):
        train(tmp_path / "run", checkpoint={"best": "f2"}, evaluation={"every": 2})


def test_an_engine_without_checkpoints_is_refused(tmp_path: Path) -> None:
    from samestep.engines.native.engine import Native

    class Forgetful(Native):
        name = "forgetful"
        abilities = replace(Native.abilities, checkpoints=False)

    with pytest.raises(UserError, match=r'run.checkpoint is given, and engine "forgetful" saves no checkpoints'):
        samestep.train(recipe(), engine=Forgetful(), folder=tmp_path / "run", checkpoint={"every": 2})


# -- the command line, and a loop of one's own

JOB = f"""
recipe: {{task: {TESTS}/small_tasks.py:Points, batch: 50, steps: 6, optimizer: {{name: sgd}}}}
run: {{threads: 1, log: []}}
"""


def test_the_command_line_goes_on_with_the_last_run_of_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text(JOB)
    assert main(["train", "job.yaml", "--checkpoint-every", "2", "--set", "recipe.steps=4"]) == 0
    assert main(["train", "job.yaml", "--resume"]) == 0
    assert "goes on from runs/job/checkpoints/step-4, after step 4" in capfd.readouterr().err
    assert steps_of(Path("runs/job")) == [2, 4, 6]
    assert main(["train", "job.yaml", "--resume", "runs/job/checkpoints/step-2", "--folder", "runs/other"]) == 0
    one, other = (load_file(f"runs/{name}/model.safetensors") for name in ("job", "other"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert main(["train", "job.yaml", "--resume", "runs/none"]) == 2
    assert "there is no such folder" in capfd.readouterr().err


def draws(folder: Path, *, stop: int) -> list[float]:
    """Numbers that the steps `stop` of a loop draw from each generator, from where its last checkpoint stands."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    drawn: list[float] = []
    with samestep.session("single", threads=1) as session:
        model = nn.Linear(2, 1)
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(session.resume(folder).step, stop):
            # One normal number of two that a draw makes, so that the other is part of the state.
            drawn += [torch.rand(()).item(), random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn()]
            session.save(folder, step=step + 1)
    return drawn


def test_generators_of_pytorch_python_and_numpy_go_on(tmp_path: Path) -> None:
    whole = draws(tmp_path / "whole", stop=4)
    assert draws(tmp_path / "cut", stop=1) + draws(tmp_path / "cut", stop=4) == whole
    assert len(set(whole)) == 20


def own_loop(folder: Path, *, stop: int, schedule: bool = True) -> tuple[int, list[float], dict[str, Any]]:
    """Steps `stop` of a loop of one's own, from where the folder's last checkpoint stands."""
    task = Points(samples=20)
    torch.manual_seed(3)
    model = task.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses: list[float] = []
    with samestep.session("single", threads=1) as session:
        model, optimizer = session.prepare(model, optimizer)
        resumed = session.resume(folder)
        for batch in session.batches(task.train_set(), batch=6, collate=task.collate, start=resumed.step, steps=stop):
            losses.append(session.step(batch, task.loss).loss.item())
            session.save(folder, step=batch.step + 1, extra={"seen": batch.step + 1})
    return resumed.step, losses, dict(resumed.extra)


def test_a_loop_of_ones_own_goes_on(tmp_path: Path) -> None:
    _, whole, _ = own_loop(tmp_path / "whole", stop=7)
    first, before, nothing = own_loop(tmp_path / "cut", stop=3)
    then, after, extra = own_loop(tmp_path / "cut", stop=7)
    assert (first, nothing) == (0, {})
    assert (then, extra) == (3, {"seen": 3})
    assert before + after == whole
