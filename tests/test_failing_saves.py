"""A disk refuses a save, which is tried again, goes into the fallback folder, or is skipped; the training goes on."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from failing_disks import RefusedOnRank, Refusing, small_disk
from small_jobs import lines_in
from small_tasks import Points, Unscored
from torch import nn

import samestep
from samestep.cli.main import main

TESTS = Path(__file__).parent


def train(folder: Path, layout: str = "single", *, steps: int = 6, **run: Any) -> samestep.TrainResult:
    task = run.pop("task", None) or Unscored()
    recipe = samestep.Recipe(task=task, batch=16, steps=steps, precision="fp64")
    return samestep.train(recipe, layout=layout, folder=folder, threads=1, log=(), check=False, device="cpu", **run)


def steps_of(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in folder.iterdir() if path.name[5:].isdigit())


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("samestep.checkpoint.save.PAUSES", (0.01, 0.02))
    monkeypatch.setattr("samestep.training.result.PAUSES", (0.01, 0.02))


@pytest.mark.parametrize(
    ("number", "asynchronous"),
    [
        (errno.EIO, True),
        (errno.EROFS, False),
        *(pytest.param(number, True, marks=pytest.mark.slow) for number in (errno.ESTALE, errno.EDQUOT)),
        pytest.param(errno.ETIMEDOUT, False, marks=pytest.mark.slow),
    ],
)
def test_a_passing_error_costs_another_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, asynchronous: bool
) -> None:
    sync = Refusing(number, at=("step-2.saving",), times=2)
    monkeypatch.setattr(os, "fsync", sync)
    result = train(tmp_path / "run", checkpoint={"every": 1, "keep": 9, "asynchronous": asynchronous})
    assert sync.refused == 2
    assert result.checkpoints_skipped == 0
    assert steps_of(tmp_path / "run" / "checkpoints") == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_save_that_can_not_be_had_is_skipped_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], asynchronous: bool
) -> None:
    monkeypatch.setattr(os, "fsync", Refusing(errno.EIO, at=("step-3.", "step-4.")))
    checkpoint = {"every": 1, "keep": 9, "asynchronous": asynchronous}
    result = train(tmp_path / "run", checkpoint=checkpoint, steps=8)
    assert result.checkpoints_skipped == 2
    assert steps_of(tmp_path / "run" / "checkpoints") == [1, 2, 5, 6, 7, 8]
    report = json.loads((tmp_path / "run" / "report.json").read_text(encoding="utf-8"))
    assert report["checkpoints_skipped"] == 2
    assert lines_in(tmp_path / "run" / "metrics.jsonl")[-1]["checkpoints_skipped"] == 2
    told = capfd.readouterr().err
    assert told.count("is skipped, and the training goes on") == 2
    assert "the disk reports an error (EIO)" in told
    assert "2 saves have failed in a row, and 6 end the training (run.checkpoint.max_failures)" in told


def test_too_many_in_a_row_are_a_failure_and_no_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    job = tmp_path / "job.yaml"
    values = {
        "recipe": {"task": f"{TESTS}/small_tasks.py:Unscored", "batch": 16, "steps": 30, "precision": "fp64"},
        "run": {
            "device": "cpu",
            "threads": 1,
            "log": (),
            "check": False,
            "folder": str(tmp_path / "run"),
            "checkpoint": {"every": 1, "max_failures": 2},
        },
    }
    job.write_text(yaml.safe_dump(values), encoding="utf-8")
    monkeypatch.setattr(os, "fsync", Refusing(errno.ENOSPC, at=[f"step-{step}." for step in range(3, 31)]))
    assert main(["train", str(job)]) == 1
    told = capfd.readouterr().err.splitlines()
    assert len(told) == 3  # two warnings and the end
    assert "3 saves have failed in a row, more than the 2 that may (run.checkpoint.max_failures)" in told[-1]
    assert "no space is left there (" in told[-1]
    assert "a checkpoint takes " in told[-1]
    assert "the newest checkpoint is " in told[-1]


def test_the_last_save_of_a_training_is_tried_and_what_is_lost_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", Refusing(errno.EIO, at=("step-4.",)))
    with pytest.raises(samestep.NotSavedError, match=r"its last checkpoint, step-4, is not saved: .*EIO.*") as caught:
        train(tmp_path / "run", checkpoint={"every": 2}, steps=4)
    assert f"the newest checkpoint is {tmp_path}/run/checkpoints/step-2" in str(caught.value)
    assert "the optimizer's state of the steps after it is lost" in str(caught.value)
    assert f"the weights are in {tmp_path}/run/model.safetensors" in str(caught.value)
    assert (tmp_path / "run" / "model.safetensors").exists()
    monkeypatch.undo()
    # What the message says is there goes on.
    assert train(tmp_path / "run", checkpoint={"resume": "auto"}, steps=4).first_step == 2


def test_the_fallback_folder_takes_what_the_first_can_not(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with small_disk(tmp_path / "small", "64k") as small:
        folders = {"folder": small, "fallback_folder": tmp_path / "second"}
        train(tmp_path / "run", checkpoint={"every": 1, "keep": 3, **folders}, steps=5)
        told = capfd.readouterr().err
        assert "small by rank 0: no space is left there (" in told
        assert f"it is in the fallback folder, {tmp_path}/second/step-5" in told
        # The newest three of both.
        assert sorted([*steps_of(small), *steps_of(tmp_path / "second")]) == [3, 4, 5]
        (tmp_path / "second" / "step-5" / "__0_0.distcp").write_bytes(b"")
        resumed = train(tmp_path / "run", checkpoint={"resume": "auto", **folders}, steps=6)
        assert resumed.first_step == 4
        assert "step-5 is damaged" in capfd.readouterr().err


def test_an_error_on_one_rank_leaves_no_other_waiting(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    result = train(
        tmp_path / "run",
        "fsdp2",
        task=RefusedOnRank(rank=1, step=2, times=1, once=tmp_path / "once"),
        checkpoint={"every": 1, "keep": 9},
    )
    assert result.checkpoints_skipped == 0
    assert steps_of(tmp_path / "run" / "checkpoints") == [1, 2, 3, 4, 5, 6]
    with pytest.raises(samestep.RankFailedError) as caught:
        train(
            tmp_path / "ended",
            "fsdp2",
            task=RefusedOnRank(rank=1, step=2, times=None, once=tmp_path / "twice"),
            steps=30,
            checkpoint={"every": 1, "max_failures": 0},
        )
    assert "can't be written into" in caught.value.reason
    assert "by rank 1: the disk reports an error (EIO)" in caught.value.reason
    assert "Traceback" not in caught.value.reason
    assert capfd.readouterr().err.count("can't be written") <= 1


def test_saves_that_fail_are_a_failure_from_which_ranks_are_started_again(tmp_path: Path) -> None:
    result = train(
        tmp_path / "run",
        task=RefusedOnRank(rank=0, step=2, times=None, once=tmp_path / "once"),
        max_restarts=1,
        checkpoint={"every": 1, "max_failures": 0, "asynchronous": False},
    )
    assert result.steps == 6
    (fault,) = lines_in(tmp_path / "run" / "faults.jsonl")
    assert "can't be written into" in fault["cause"]
    assert fault["goes_on_at"] == 2


def test_what_can_never_be_written_is_told_before_the_training(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", "1k") as small:
        (small / "full").write_bytes(b"x" * 4096)
        with pytest.raises(samestep.UserError, match=r"small can't be written: No space left on device"):
            train(tmp_path / "run", checkpoint={"folder": small, "fallback_folder": small / "x"})
        assert not (tmp_path / "run" / "metrics.jsonl").exists()
    (tmp_path / "file").touch()
    with pytest.raises(samestep.CheckpointError, match=r"fallback_folder is .*file: .*file is a file"):
        train(tmp_path / "run", checkpoint={"fallback_folder": tmp_path / "file"})
    with pytest.raises(samestep.CheckpointError, match="where checkpoints are saved anyway"):
        train(tmp_path / "run", checkpoint={"folder": tmp_path / "a", "fallback_folder": tmp_path / "a"})
    with pytest.raises(samestep.UserError, match=r"max_failures is 1001; it should be less than or equal to 1000"):
        train(tmp_path / "run", checkpoint={"max_failures": 1001})


def test_a_removal_that_fails_spoils_no_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    remove, refused = shutil.rmtree, []

    def refuse(path: Any, *args: Any, **options: Any) -> None:
        if str(path).endswith(".replaced") and not options.get("ignore_errors") and len(refused) < 2:
            refused.append(path)
            raise OSError(errno.EIO, "Input/output error")
        remove(path, *args, **options)

    monkeypatch.setattr(shutil, "rmtree", refuse)
    result = train(tmp_path / "run", checkpoint={"every": 1, "keep": 2})
    assert len(refused) == 2
    assert result.checkpoints_skipped == 0
    assert steps_of(tmp_path / "run" / "checkpoints") == [5, 6]


def own_loop(folder: Path) -> None:
    task = Points()
    with samestep.session("single", threads=1, device="cpu") as session:
        model = task.model()
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for batch in session.batches(task.train_set(), batch=16, collate=task.collate, steps=4):
            session.step(batch, task.loss)
            session.save(folder, step=batch.step + 1)


def test_a_loop_of_ones_own_skips_a_save_and_tells_where_its_last_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "fsync", Refusing(errno.EIO, at=("step-2.",)))
    own_loop(tmp_path / "one")
    assert steps_of(tmp_path / "one") == [1, 3, 4]
    assert "is skipped, and the training goes on" in capfd.readouterr().err
    monkeypatch.setattr(os, "fsync", Refusing(errno.EIO, at=("step-4.",)))
    with pytest.raises(samestep.NotSavedError, match="the newest checkpoint is"):
        own_loop(tmp_path / "two")


class Wide(Unscored):
    """128 KiB of weights."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 2048), nn.GELU(), nn.Linear(2048, 3))


@pytest.mark.parametrize("earlier", [False, True])
def test_the_room_for_state_that_the_first_step_makes(tmp_path: Path, *, earlier: bool) -> None:
    """AdamW's averages, twice the weights, are no part of a checkpoint that would be made before the first step."""
    with small_disk(tmp_path / "run", "300k") as folder:
        if earlier:
            (folder / "report.json").write_text("{}", encoding="utf-8")
        with pytest.raises(samestep.UserError, match=r"one takes .* KiB, and .* of 300 KiB are free") as caught:
            train(folder, task=Wide(), checkpoint={"every": 5}, overwrite=earlier)
        needed = float(str(caught.value).partition("one takes ")[2].split()[0])
        assert 3 * 128 <= needed <= 3 * 128 + 48  # and what the files say of each tensor, and the generators
        assert not list(folder.glob("checkpoints/*"))
        assert (folder / "report.json").exists() == earlier
