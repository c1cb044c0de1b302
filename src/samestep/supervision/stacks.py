"""A rank's Python stack, asked for by its starter. It comes even where the rank holds the interpreter's lock."""

import faulthandler
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

# One that nothing else uses; where a system has none of these, one that is left to programs.
_SIGNAL = signal.SIGRTMIN + 6 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2
_PATIENCE = 2.0  # seconds


def answer(folder: Path, rank: int) -> IO[str]:
    """In a rank: write the main thread's stack whenever it is asked for. The file must stay open until `ignore`."""
    file = _file(folder, rank).open("w", encoding="utf-8")
    faulthandler.register(_SIGNAL, file=file, all_threads=False)
    return file


def ignore(file: IO[str]) -> None:
    """Answer no more."""
    faulthandler.unregister(_SIGNAL)
    signal.signal(_SIGNAL, signal.SIG_IGN)  # one that is under way must not end this rank
    file.close()


def ask(folder: Path, rank: int, pid: int) -> str:
    """The stack, the innermost call first; empty where the rank does not answer. A stopped one goes on for it."""
    file = _file(folder, rank)
    with suppress(OSError):
        begin = file.stat().st_size
        os.kill(pid, _SIGNAL)
        os.kill(pid, signal.SIGCONT)
        until = time.monotonic() + _PATIENCE
        while time.monotonic() < until:
            time.sleep(0.05)
            if file.stat().st_size > begin:
                time.sleep(0.05)  # for its last line
                return file.read_text(encoding="utf-8", errors="replace")[begin:].strip()
    return ""


def _file(folder: Path, rank: int) -> Path:
    return folder / f"stack-{rank}.txt"
