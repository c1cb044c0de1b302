"""Copies of a training's state in the host's memory: a restart goes on from them, and nothing of them stays."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from held_tasks import AfterCopy
from small_jobs import faults_in
from small_tasks import Points, Unscored

import samestep


def train(folder: Path, layout: str, task: samestep.Task | None = None, **run: Any) -> samestep.TrainResult:
    recipe = samestep.Recipe(task=task or Points(), batch=16, steps=9, precision="fp64")
    return samestep.train(recipe, layout=layout, folder=folder, threads=1, log=(), **run)


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The place of copies, in which no other job makes any."""
    place = tmp_path / "memory"
    place.mkdir()
    monkeypatch.setattr("samestep.fault_tolerance.scratch._IN_MEMORY", place)
    return place


@pytest.mark.slow
@pytest.mark.parametrize("layout", [pytest.param("dp2", marks=pytest.mark.slow), "fsdp2"])
def test_a_lost_rank_is_refilled_from_memory(
    tmp_path: Path, layout: str, memory: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = train(tmp_path / "whole", layout, Unscored())
    result = train(
        tmp_path / "run",
        layout,
        AfterCopy(memory=str(memory), step=6),
        checkpoint={"every": 5, "memory": 2},
        max_restarts=1,
        inject={"rank": 1, "step": 7, "fault": "kill"},
    )
    assert result.losses == whole.losses
    assert result.model_file.read_bytes() == whole.model_file.read_bytes()
    (found,) = faults_in(tmp_path / "run")
    assert (found["goes_on_at"], found["steps_lost"]) == (6, 1)  # the disk has the state after 5 steps
    (folder,) = re.findall(
        rf"goes on from {memory}/(samestep-memory-\w+)/step-6, after step 6", capfd.readouterr().err
    )
    assert not (memory / folder).exists()


@pytest.mark.slow
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
    tmp_path: Path, memory: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", memory]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a small disk needs the right to mount one")
    try:
        whole = train(tmp_path / "whole", "single")
        result = train(tmp_path / "run", "single", checkpoint={"every": 5, "memory": 2}, max_restarts=1)
    finally:
        subprocess.run(["umount", "--lazy", memory], check=True)
    assert result.losses == whole.losses
    told = capfd.readouterr().err
    assert told.count("goes on without copies in memory") == 1
    # Measured before: nothing is written that a restart would lack.
    assert re.search(r"a copy in memory takes .* of the 16 KiB of .*memory .* are free, of which 16 MiB stay", told)
    assert "restarts with the disk's" in told


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
