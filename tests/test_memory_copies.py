"""Copies of a training's state in the host's memory: a restart goes on from them, and nothing of them stays."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from small_jobs import faults_in
from small_tasks import Points

import samestep


def train(folder: Path, layout: str, **run: Any) -> samestep.TrainResult:
    recipe = samestep.Recipe(task=Points(), batch=16, steps=9, precision="fp64")
    return samestep.train(recipe, layout=layout, folder=folder, threads=1, tensorboard=False, **run)


def folders_named(said: str) -> set[Path]:
    return {Path("/dev/shm", name) for name in re.findall(r"samestep-memory-\w+", said)}


@pytest.mark.parametrize("layout", [pytest.param("dp2", marks=pytest.mark.slow), "fsdp2"])
def test_a_lost_rank_is_refilled_from_memory(tmp_path: Path, layout: str, capfd: pytest.CaptureFixture[str]) -> None:
    whole = train(tmp_path / "whole", layout)
    result = train(
        tmp_path / "run",
        layout,
        checkpoint={"every": 5, "memory": 2},
        max_restarts=1,
        inject={"rank": 1, "step": 8, "fault": "kill"},
    )
    assert result.losses == whole.losses
    assert result.model_file.read_bytes() == whole.model_file.read_bytes()
    (found,) = faults_in(tmp_path / "run")
    told = capfd.readouterr().err
    (folder,) = folders_named(told)
    assert not folder.exists()
    # Copies are made beside the training: when the fault comes, that after 8 steps may be complete or not, but the
    # one before it is, and newer than the disk's after 5. The ranks go on from the very copy that is named.
    step = found["goes_on_at"]
    assert step in (6, 8)
    assert re.findall(r"goes on from (\S+), after step (\d+)", told) == [(f"{folder}/step-{step}", str(step))]
    assert found["steps_lost"] == 8 - step


def test_the_disk_is_taken_where_it_is_newer(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    train(
        tmp_path / "run",
        "dp2",
        checkpoint={"every": 1, "memory": 4, "asynchronous": False},
        max_restarts=1,
        inject={"rank": 0, "step": 7, "fault": "kill"},
    )
    assert "goes on from" in (told := capfd.readouterr().err)
    assert "checkpoints/step-7" in told


def test_without_room_for_them_the_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = train(tmp_path / "whole", "single")
    full = tmp_path / "full"
    full.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", full], capture_output=True, check=False)
    if done.returncode:
        pytest.skip("a small disk needs the right to mount one")
    monkeypatch.setattr("samestep.fault_tolerance.scratch._IN_MEMORY", full)
    try:
        result = train(tmp_path / "run", "single", checkpoint={"every": 5, "memory": 2}, max_restarts=1)
    finally:
        subprocess.run(["umount", "--lazy", full], check=True)
    assert result.losses == whole.losses
    told = capfd.readouterr().err
    assert told.count("goes on without copies in memory") == 1
    assert "no space is left" in told


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ({"checkpoint": {"memory": 2}}, r"memory is 2, .* run.max_restarts of 1 or more"),
        ({"checkpoint": {"memory": 0}, "max_restarts": 1}, r"run\.checkpoint\.memory"),
    ],
)
def test_copies_that_can_not_be_meant(tmp_path: Path, run: dict[str, Any], message: str) -> None:
    with pytest.raises(samestep.UserError, match=message):
        train(tmp_path / "run", "dp2", **run)
