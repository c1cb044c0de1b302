"""What tests of `samestep launch` share: a folder of their own, processes that end with the test, free ports."""

import gc
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from small_jobs import wait_until

from samestep.launch.network import held_port

SCRIPTS = Path(__file__).parent / "scripts"
TOLD = str(SCRIPTS / "told.py")


@contextmanager
def in_a_folder_of_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Work there, with nobody's files of variables; fail where a process of the test is left."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(folder / "home"))
    yield
    gc.collect()
    deadline = time.monotonic() + 5
    while (left := ranks_alive()) and time.monotonic() < deadline:
        time.sleep(0.05)
    for process in left:
        process.kill()
    assert not left


def ranks_alive() -> list[psutil.Process]:
    """Processes of this test's jobs, whoever is their parent now."""
    found = []
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
            ours = process.environ().get("SAMESTEP_TEST") == os.environ["SAMESTEP_TEST"]
            if ours and any(word == TOLD or word.startswith("samestep.launch.start") for word in words):
                found.append(process)
        except (psutil.AccessDenied, psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    return found


@contextmanager
def started(*words: str, **environ: str) -> Iterator[subprocess.Popen[str]]:
    """`samestep launch` in a process of its own, which ends with the block."""
    with subprocess.Popen(
        [sys.executable, "-m", "samestep", "launch", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environ},
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def await_files(*files: str) -> None:
    wait_until(lambda: all(Path(file).exists() for file in files), told=lambda: f"{files} are not all there")


def free_port() -> int:
    """A port on which nothing listens, and that no other test is given by chance."""
    with held_port() as held:
        return held.getsockname()[1]
