"""Where the system gives little: closed streams, few files, small or read-only memory, full and missing folders.

Each works, or ends in one message; none in a traceback, and none waits for ever.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from failing_disks import small_disk
from small_jobs import job_file, wait_until
from small_tasks import Unscored
from torch import Tensor

import samestep
from samestep.training.metrics_log import PatientFile

SHM = "mount -t tmpfs -o {} tmpfs /dev/shm; "
TMP = "mount -t tmpfs -o size=4k tmpfs tmp; export TMPDIR=$PWD/tmp; "
slow = pytest.mark.slow
SAVES = {"every": 1, "asynchronous": False}


def run_in_shell(
    folder: Path, before: str, after: str = "", *, layout: str = "dp2"
) -> subprocess.CompletedProcess[str]:
    """Train by the command line in a mount namespace of its own, after some shell commands."""
    job = job_file(folder, run={"checkpoint": {"every": 2}, "check": False}, evaluation={"at_end": False})
    (folder / "tmp").mkdir(exist_ok=True)
    train = f"{sys.executable} -m samestep train {job} --layout {layout} --folder {folder}/run"
    shell = ["unshare", "-m", "bash", "-c", f"set -o pipefail; {before}{train} {after}"]
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip("a mount namespace needs the right to make one")
    return subprocess.run(shell, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.timeout(130)
@pytest.mark.parametrize(
    ("before", "after", "code", "told"),
    [
        pytest.param("", ">&-", 0, "", marks=slow),
        pytest.param("", "2>&-", 0, "", marks=slow),
        pytest.param("", "<&-", 0, "", marks=slow),
        pytest.param("", "| true", 0, "", marks=slow),
        pytest.param("", ">/dev/full", 0, "standard output can't be written: No space left on device", marks=slow),
        pytest.param("", "2>/dev/full", 0, "", marks=slow),
        (SHM.format("size=1m,ro"), "", 1, "their semaphores lie in /dev/shm, and it is read-only; mount it writable"),
        pytest.param(
            SHM.format("size=4k"),
            "",
            1,
            r"semaphores lie in /dev/shm, and no space is left there \(.* free\)",
            marks=slow,
        ),
        pytest.param("ulimit -n 20; ", "", 1, "a process may open 20 files, too few", marks=slow),
        pytest.param("ulimit -n 40; ", "", 1, "a process may open 40 files, too few", marks=slow),
        # Above 1.3 GB it works; how it ends below depends on what asks for memory first.
        pytest.param("ulimit -v 1100000; ", "", 1, r"1,126,400,000 bytes of addresses \(ulimit -v\)", marks=slow),
        pytest.param("ulimit -v 900000; ", "", 1, r"921,600,000 bytes of addresses \(ulimit -v\)", marks=slow),
        ("mkdir gone; cd gone; rmdir ../gone; ", "", 2, "the folder that this command started in is no longer there"),
        pytest.param("unset HOME; ", "", 0, "", marks=slow),
        pytest.param("export HOME=/proc/none; ", "", 0, "XDG_CACHE_HOME names another folder", marks=slow),
        pytest.param("export TMPDIR=/nowhere; ", "", 0, "", marks=slow),
        pytest.param(TMP, "", 0, r"the ranks' status can't be written into .*/tmp.*; it is in /dev/shm", marks=slow),
    ],
)
def test_each_works_or_ends_in_one_message(tmp_path: Path, before: str, after: str, code: int, told: str) -> None:
    ended = run_in_shell(tmp_path, before, after)
    assert ended.returncode == code, ended.stderr
    assert "Traceback" not in ended.stderr
    assert re.search(told, ended.stderr), ended.stderr
    lines = [line for line in ended.stderr.splitlines() if line.startswith("samestep:")]
    assert len(lines) == (1 if told else 0), ended.stderr
    assert (tmp_path / "run" / "report.json").exists() == (code == 0)


def train(
    folder: Path, task: samestep.Task, layout: str = "dp2", *, steps: int = 6, **run: Any
) -> samestep.TrainResult:
    recipe = samestep.Recipe(task=task, batch=16, steps=steps, precision="fp64")
    run = {"threads": 1, "log": (), "check": False, "device": "cpu", **run}
    return samestep.train(recipe, layout=layout, folder=folder, **run)


def test_weights_that_do_not_fit_are_told_with_what_they_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("samestep.training.result.PAUSES", (0.01,))
    with (
        small_disk(tmp_path / "small", "4k") as small,
        pytest.raises(
            samestep.NotSavedError, match=r"model\.safetensors can't be written, in 2 tries: no space"
        ) as caught,
    ):
        train(small / "run", Unscored(), "single")
    assert re.search(r"\(1\.3 KiB are needed, 0 B of 4 KiB are free\)", str(caught.value))
    assert not (small / "run" / "report.json").exists()


class Filling(Unscored):
    """Rank 0 fills a folder in its third loss, and then does what `then` says."""

    def __init__(self, *, folder: str, then: str) -> None:
        super().__init__()
        self.folder, self.then, self.calls = folder, then, 0

    def loss(self, output: Tensor, batch: samestep.Batch) -> tuple[Tensor, Tensor | int]:
        self.calls += 1
        if self.calls == 3 and dist.get_rank() == 0:
            with (Path(self.folder) / "full").open("wb", buffering=0) as file:
                try:
                    while file.write(bytes(1 << 16)):
                        pass
                except OSError:
                    (Path(self.folder).parent / "is-full").touch()
            if self.then == "raise":
                print("x" * 10000, flush=True)  # a log without room ends nothing
                raise RuntimeError("planted on a full disk")
        if self.then == "wait":
            time.sleep(0.3)
        return super().loss(output, batch)


@pytest.mark.timeout(60)
def test_the_reason_of_a_rank_is_told_though_the_run_folder_is_full(tmp_path: Path) -> None:
    with (
        small_disk(tmp_path / "small", "64k") as small,
        pytest.raises(samestep.RankFailedError, match="RuntimeError: planted on a full disk"),
    ):
        train(small, Filling(folder=str(small), then="raise"))


@pytest.mark.timeout(60)
def test_a_signal_is_heard_though_the_temporary_folder_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with small_disk(tmp_path / "small", "8m") as small:
        monkeypatch.setenv("TMPDIR", str(small))
        monkeypatch.setattr("tempfile.tempdir", str(small))

        def stop() -> None:
            wait_until(lambda: (tmp_path / "is-full").exists(), 40)
            os.kill(os.getpid(), signal.SIGTERM)

        sender = threading.Thread(target=stop)
        sender.start()
        try:
            with pytest.raises(samestep.InterruptedJobError) as caught:
                train(
                    tmp_path / "run",
                    Filling(folder=str(small), then="wait"),
                    steps=200,
                    checkpoint={"every": 500},
                    grace_period=20,
                )
        finally:
            sender.join()
    assert caught.value.signal_number == signal.SIGTERM
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))  # saved, within the grace period
    assert "SIGKILL" not in capfd.readouterr().err


class Removing(Unscored):
    """Removes the run's folder in its third loss, as somebody who clears up would."""

    def __init__(self, *, folder: str) -> None:
        super().__init__()
        self.folder, self.calls = folder, 0

    def loss(self, output: Tensor, batch: samestep.Batch) -> tuple[Tensor, Tensor | int]:
        self.calls += 1
        if self.calls == 3:
            subprocess.run(["rm", "-r", self.folder], check=True)
        return super().loss(output, batch)


def test_a_run_whose_folder_is_removed_ends_and_says_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    task = Removing(folder=str(tmp_path / "run"))
    with pytest.raises(samestep.CheckpointError, match="was deleted while the training ran"):
        train(tmp_path / "run", task, "single", checkpoint=SAVES, log="tensorboard")
    assert "Traceback" not in capfd.readouterr().err  # of TensorBoard's thread


@pytest.mark.parametrize("removed", ["run", "run/checkpoints/step-1.saving"])
def test_a_folder_that_is_removed_while_a_checkpoint_is_written_is_told(
    removed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    gather, calls = dist.all_gather_object, []

    def removing(gathered: list[Any], value: Any, **group: Any) -> None:
        if isinstance(value, dict) and ".metadata" in value and not calls:  # the sums of what is written
            calls.append(value)
            shutil.rmtree(tmp_path / removed)
        gather(gathered, value, **group)

    monkeypatch.setattr(dist, "all_gather_object", removing)
    monkeypatch.setattr("samestep.checkpoint.save.PAUSES", (0.01,))
    if removed == "run":
        with pytest.raises(samestep.CheckpointError, match="run was deleted while the training ran"):
            train(tmp_path / "run", Unscored(), "single", steps=2, checkpoint=SAVES)
    else:  # the save is tried again
        assert train(tmp_path / "run", Unscored(), "single", steps=2, checkpoint=SAVES).steps == 2
        assert (tmp_path / "run" / "checkpoints" / "step-1" / "checkpoint.json").exists()
    assert calls
    assert "all hosts share" not in capfd.readouterr().err


def test_lines_that_find_no_room_are_written_when_there_is(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with small_disk(tmp_path / "small", "8k") as small:
        file = PatientFile(small / "metrics.jsonl")
        (small / "other").write_bytes(bytes(4096))
        lines = [f"{number:<100}" for number in range(100)]
        for line in lines[:90]:
            file.add(line)
        told = capfd.readouterr().err
        assert told.count("no space is left there (0 B of 8 KiB are free)") == 1
        assert told.count("samestep:") == 1
        (small / "other").unlink()
        subprocess.run(["mount", "-o", "remount,size=64k", small], check=True)
        for line in lines[90:]:
            file.add(line)
        file.close()
        assert (small / "metrics.jsonl").read_text(encoding="utf-8").splitlines() == lines
        assert not capfd.readouterr().err
