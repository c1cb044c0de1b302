"""Records of a benchmark's ranks: the times at which each process took its steps."""

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple


class Process(NamedTuple):
    """A process that takes steps; a rank that is started again is a new one."""

    host: str
    rank: int
    pid: int


def note(folder: Path, rank: int, step: int, seconds: float) -> None:
    """Wait for `seconds`, then append the time and the step to this process's file."""
    time.sleep(seconds)
    with (folder / f"steps-{socket.gethostname()}-{rank}-{os.getpid()}").open("a", encoding="ascii") as file:
        file.write(f"{time.time()} {step}\n")


def noted(folder: Path) -> Mapping[Process, list[float]]:
    """The times of each process's steps, in seconds since 1970, in the order in which processes began."""
    found: dict[Process, list[float]] = {}
    for file in folder.glob("steps-*"):
        host, rank, pid = file.name.removeprefix("steps-").rsplit("-", 2)
        whole = [line for line in file.read_text(encoding="ascii").splitlines(keepends=True) if line.endswith("\n")]
        if whole:
            found[Process(host=host, rank=int(rank), pid=int(pid))] = [float(line.split()[0]) for line in whole]
    return dict(sorted(found.items(), key=lambda each: each[1][0]))


def last_step(folder: Path) -> int:
    """The last step that any process has recorded; -1 if none yet. Reads only the ends of the files."""
    found = -1
    for file in folder.glob("steps-*"):
        with file.open("rb") as content:
            content.seek(max(0, file.stat().st_size - 256))
            whole = [line for line in content.read().split(b"\n")[:-1] if len(line.split()) == 2]
        if whole:
            found = max(found, int(whole[-1].split()[1]))
    return found
