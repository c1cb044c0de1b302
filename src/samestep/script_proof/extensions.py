"""Operators that a script compiles in its first run, such as DeepSpeed's on CPUs.

PyTorch keeps what was compiled, and a lock beside it while it compiles, which a killed process leaves behind: every
later run would wait for it without end.
"""

import time
from pathlib import Path

import psutil

from samestep import environment

_LEFT = 3600.0  # seconds after which a lock that nobody here has open is taken for left behind by another run
_ENDING = 2.0  # seconds in which a killed process lets go of its files


def compiling(since: float) -> list[str]:
    """The operators that are being compiled, by locks made since a time."""
    return sorted(lock.parent.name for lock in _locks() if _made(lock) >= since)


def remove_abandoned(since: float) -> None:
    """Remove locks that no process here has open, if they were made since a time, or an hour ago.

    Others may be held by another host that has the same home.
    """
    until = time.monotonic() + _ENDING
    while locks := [lock for lock in _locks() if _made(lock) >= since or _made(lock) < time.time() - _LEFT]:
        held = _open_files()
        for lock in locks:
            if str(lock) not in held:
                lock.unlink(missing_ok=True)
        if all(str(lock) not in held for lock in locks) or time.monotonic() > until:
            return
        time.sleep(0.1)


def _locks() -> list[Path]:
    root = environment.extension_folder().resolve()
    return [*root.glob("*/lock"), *root.glob("*/*/lock")] if root.is_dir() else []


def _made(lock: Path) -> float:
    try:
        return lock.stat().st_mtime
    except FileNotFoundError:  # it is over
        return 0.0


def _open_files() -> set[str]:
    """The files that processes of this user have open."""
    paths: set[str] = set()
    for process in psutil.process_iter():
        try:
            paths |= {file.path for file in process.open_files()}
        except psutil.Error:
            continue
    return paths
