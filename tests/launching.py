"""What tests of `samestep launch` share: a folder of their own, processes that end with the test, free ports."""

import gc
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from small_jobs import wait_until
from torch.distributed import TCPStore

from samestep.launch.job_secret import JobSecret
from samestep.launch.network import held_port, store_at
from samestep.launch.signed_store import open_to_hosts

SCRIPTS = Path(__file__).parent / "scripts"
TOLD = str(SCRIPTS / "told.py")


@contextmanager
def in_a_folder_of_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Change into a folder without the user's files of variables; fail if a process of the test is left."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(folder / "home"))
    yield
    assert_nothing_is_left()


def assert_nothing_is_left(limit: float = 30) -> None:
    """Kill what is left of this test's jobs, and fail if anything is, after `limit` seconds in which it may end."""
    gc.collect()
    deadline = time.monotonic() + limit
    while (left := processes_alive()) and time.monotonic() < deadline:
        time.sleep(0.05)
    words = [described(process) for process in left]
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    assert not words, "\n".join(words)


def described(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return f"{process.pid}: {' '.join(process.cmdline())}"
    return str(process)


def processes_alive() -> list[psutil.Process]:
    """Processes of this test's jobs: children, and orphans that a killed job left to another parent.

    They have the mark of these tests in the environment that they were started with (tests/conftest.py). Left out are
    this process and two children that live as long as it does: the server that ranks are forked from, and Python's
    tracker of shared memory and semaphores.
    """
    found = []
    for process in psutil.process_iter():
        try:
            ours = process.environ().get("SAMESTEP_TEST") == str(os.getpid())
            if ours and process.pid != os.getpid() and not _lives_as_long_as_the_tests(process):
                found.append(process)
        except (psutil.AccessDenied, psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    return found


def _lives_as_long_as_the_tests(process: psutil.Process) -> bool:
    command = " ".join(process.cmdline())
    helpers = ("multiprocessing.forkserver", "multiprocessing.resource_tracker")
    return process.ppid() == os.getpid() and any(f"from {helper} import main" in command for helper in helpers)


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


def hosts_store(secret: JobSecret | None = None) -> TCPStore:
    """A store on the loopback where hosts of a job meet."""
    store = store_at("127.0.0.1")
    open_to_hosts(store, secret)
    return store


def free_port() -> int:
    """A port on which nothing listens, and that no other test is given by chance."""
    with held_port() as held:
        return held.getsockname()[1]
