"""A kill at any moment leaves the last complete checkpoint, and nothing that looks complete and isn't."""

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from small_tasks import Points

import samestep
from samestep.checkpoint.folder import fault_of
from samestep.checkpoint.info import read_info
from samestep.checkpoint.safe_index import read_metadata
from samestep.launch import fork_server

TESTS = Path(__file__).parent


def save_without_end(folder: str) -> None:
    """Train in one process and save after every step, until somebody ends it."""
    recipe = samestep.Recipe(task=Points(samples=40), batch=8, steps=1_000_000)
    samestep.train(
        recipe,
        threads=1,
        folder=Path(folder),
        log=(),
        checkpoint={"every": 1, "keep": 4, "resume": "auto"},
    )


def check_complete(folder: Path) -> list[int]:
    """Every folder that bears a checkpoint's name is one, to the last byte; returns their steps."""
    steps: list[int] = []
    for path in folder.glob("step-*"):
        if path.name.endswith((".saving", ".replaced")):
            continue
        info = read_info(path)
        assert path.name == f"step-{info.step}"
        assert fault_of(path, info.files) is None
        read_metadata(path)
        steps.append(info.step)
    return sorted(steps)


def kill_and_go_on(tmp_path: Path, times: int) -> None:
    fork_server.preload()  # else every start imports PyTorch again
    forks = multiprocessing.get_context("forkserver")
    folder = tmp_path / "run" / "checkpoints"
    moments = random.Random(7)
    last = 0
    for number in range(times):
        process = forks.Process(target=save_without_end, args=(str(tmp_path / "run"),))
        process.start()
        try:
            # Where there is one, it goes on from it, or this would never get far.
            limit = time.monotonic() + 60
            while not folder.is_dir() or max(check_complete_names(folder), default=0) <= last:
                assert time.monotonic() < limit, "nothing was saved"
                assert process.is_alive()
                time.sleep(0.002)
            time.sleep(moments.uniform(0, 0.05))
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
        finally:
            process.kill()
            process.join()
        steps = check_complete(folder)
        assert steps, f"after kill {number} there was none"
        assert steps[-1] > last
        last = steps[-1]


def check_complete_names(folder: Path) -> list[int]:
    return [int(path.name[5:]) for path in folder.iterdir() if path.name[5:].isdigit()]


def test_kills_while_it_saves(tmp_path: Path) -> None:
    kill_and_go_on(tmp_path, 8)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_fifty_kills_while_it_saves(tmp_path: Path) -> None:
    kill_and_go_on(tmp_path, 50)


JOB = f"""
recipe: {{task: {TESTS}/small_tasks.py:Points, batch: 8, steps: 1000000}}
run: {{layout: fsdp2, threads: 1, log: [], checkpoint: {{every: 1, keep: 4, resume: auto}}}}
"""


@pytest.mark.slow
def test_a_kill_of_two_ranks_while_they_save(tmp_path: Path) -> None:
    """All processes of the job at once, as when its host loses power."""
    (tmp_path / "job.yaml").write_text(JOB)
    folder = tmp_path / "run" / "checkpoints"
    command = [
        sys.executable,
        "-m",
        "samestep",
        "train",
        str(tmp_path / "job.yaml"),
        "--folder",
        str(tmp_path / "run"),
    ]
    last = 0
    for _ in range(2):
        process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL)
        try:
            limit = time.monotonic() + 90
            while not folder.is_dir() or max(check_complete_names(folder), default=0) <= last:
                assert time.monotonic() < limit, "nothing was saved"
                assert process.poll() is None
                time.sleep(0.01)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        steps = check_complete(folder)
        assert steps
        assert steps[-1] > last
        last = steps[-1]
