"""Folders that end with their process: what a killed one left is removed by a later one, and nothing else."""

import fcntl
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from samestep.fault_tolerance import scratch as module
from samestep.fault_tolerance.scratch import folder_in_memory, scratch

KILLED = """
import os, signal, sys
from pathlib import Path
from samestep.fault_tolerance.scratch import scratch

with scratch("samestep-test-", Path(sys.argv[1])) as folder:
    (folder / "rank-0").mkdir()
    (folder / "rank-0" / "copy").write_bytes(b"1234")
    print(folder, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_later_process_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    left = Path(done.stdout.strip())
    assert (left / "rank-0" / "copy").exists()
    with scratch("samestep-test-", tmp_path) as first, scratch("samestep-test-", tmp_path) as second:
        assert not left.exists()
        assert sorted(tmp_path.iterdir()) == sorted([first, second])  # one that is held stays
    assert list(tmp_path.iterdir()) == []


FORKED = """
import atexit, os, sys
from contextlib import ExitStack
from pathlib import Path
from samestep.fault_tolerance.scratch import scratch

stack = ExitStack()
folder = stack.enter_context(scratch("samestep-test-", Path(sys.argv[1])))
atexit.register(stack.close)
del stack
child = os.fork()
if child == 0:
    atexit._clear()  # as Python's fork server does in each process that it forks
    os._exit(0)
os.waitpid(child, 0)
print(folder.is_dir(), flush=True)
"""


def test_a_forked_process_leaves_the_folder_to_its_starter(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FORKED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "True\n"
    assert list(tmp_path.iterdir()) == []  # the starter has removed it at its end


KILLED_WITH_SEMAPHORES = """
import multiprocessing, os, signal
from multiprocessing import resource_tracker
from samestep.fault_tolerance.scratch import folder_in_memory

with folder_in_memory() as folder:
    event = multiprocessing.get_context("forkserver").Event()  # as PyTorch's agent has one
    print(folder, len(list(folder.parent.glob(f"sem.{folder.name}-*"))), flush=True)
    os.kill(resource_tracker._resource_tracker._pid, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="named semaphores are files of /dev/shm on Linux alone")
def test_a_later_process_removes_semaphores_of_a_killed_one() -> None:
    command = [sys.executable, "-c", KILLED_WITH_SEMAPHORES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    name, semaphores = done.stdout.split()
    assert int(semaphores) > 0
    folder = Path(name)
    before = multiprocessing.current_process()._config["semprefix"]  # pyright: ignore[reportAttributeAccessIssue]
    # Another job may start meanwhile, and remove them before this one does.
    with folder_in_memory():
        assert not folder.exists()
        assert list(folder.parent.glob(f"sem.{folder.name}-*")) == []
    assert multiprocessing.current_process()._config["semprefix"] == before  # pyright: ignore[reportAttributeAccessIssue]


WITH_A_SEMAPHORE = """
import multiprocessing, sys
from samestep.fault_tolerance.scratch import folder_in_memory

with folder_in_memory() as folder:
    event = multiprocessing.get_context("forkserver").Event()
    print(len(list(folder.parent.glob(f"sem.{folder.name}-*"))))
print(len(list(folder.parent.glob(f"*{folder.name}*"))))
event.set()  # its object is still there
"""


@pytest.mark.skipif(sys.platform != "linux", reason="named semaphores are files of /dev/shm on Linux alone")
def test_semaphores_do_not_outlive_their_folder() -> None:
    """Where the process was killed after it, nothing would lead a later one to them."""
    command = [sys.executable, "-c", WITH_A_SEMAPHORE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    within, after = map(int, done.stdout.split())
    assert within > 0
    assert after == 0


def test_what_may_be_somebody_elses_stays(tmp_path: Path) -> None:
    linked = tmp_path / "elsewhere"
    linked.mkdir()
    (linked / ".held").touch()
    (tmp_path / "samestep-test-link").symlink_to(linked)
    (tmp_path / "samestep-test-new").mkdir()  # one that is just being made, or of an older version
    (tmp_path / "samestep-test-file").touch()
    (tmp_path / "samestep-other").mkdir()
    (tmp_path / "samestep-other" / ".held").touch()
    known = set(tmp_path.iterdir())
    if os.getuid() == 0:
        theirs = tmp_path / "samestep-test-theirs"
        theirs.mkdir()
        (theirs / ".held").touch()
        os.chown(theirs, 12345, 12345)
        known.add(theirs)
    with scratch("samestep-test-", tmp_path) as folder:
        assert set(tmp_path.iterdir()) == {*known, folder}
    assert set(tmp_path.iterdir()) == known
    assert (linked / ".held").exists()


def test_one_that_is_taken_away_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    lock: Any = fcntl.flock

    def just_too_late(descriptor: int, how: int) -> None:
        calls.append(how)
        if len(calls) == 1:
            (new,) = tmp_path.iterdir()
            module._remove_unless_held(new)
            assert not new.exists()
        lock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", just_too_late)
    with scratch("samestep-test-", tmp_path) as folder:
        assert list(tmp_path.iterdir()) == [folder]
    assert calls == [fcntl.LOCK_EX, fcntl.LOCK_EX | fcntl.LOCK_NB, fcntl.LOCK_EX]


def test_without_locks_nothing_is_removed_but_the_own_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: Any) -> None:
        raise OSError("no locks available")

    monkeypatch.setattr(fcntl, "flock", refuses)
    left = tmp_path / "samestep-test-left"
    left.mkdir()
    (left / ".held").touch()
    with scratch("samestep-test-", tmp_path) as folder:
        assert set(tmp_path.iterdir()) == {left, folder}
    assert list(tmp_path.iterdir()) == [left]
