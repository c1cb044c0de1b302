"""Python stacks of a rank, requested by its starter by a signal. Works even if the rank holds the GIL."""

import faulthandler
import os
import re
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

# A real-time signal that nothing else uses; SIGUSR2, for programs, on systems without those.
_SIGNAL = signal.SIGRTMIN + 6 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2
_PATIENCE = 2.0  # seconds


def answer(folder: Path, rank: int) -> IO[str]:
    """In a rank: dump all stacks on each request. The file must stay open until `ignore`."""
    file = _file(folder, rank).open("w", encoding="utf-8")
    # Any thread may receive the signal, so all are dumped; the file starts with the main thread's id.
    file.write(f"{threading.main_thread().ident:#018x}\n")
    file.flush()
    faulthandler.register(_SIGNAL, file=file, all_threads=True)
    return file


def ignore(file: IO[str]) -> None:
    """Stop responding to requests."""
    faulthandler.unregister(_SIGNAL)
    signal.signal(_SIGNAL, signal.SIG_IGN)  # a pending request must not end this rank
    file.close()


def ask(folder: Path, rank: int, pid: int) -> str:
    """Request a rank's main stack, innermost call first; empty without a response. Resumes a stopped rank."""
    file = _file(folder, rank)
    with suppress(OSError):
        os.kill(pid, _SIGNAL)
        os.kill(pid, signal.SIGCONT)
        until = time.monotonic() + _PATIENCE
        while time.monotonic() < until:
            time.sleep(0.05)
            if _main_stack(file):
                time.sleep(0.05)  # for its last lines
                return _main_stack(file)
    return ""


def _main_stack(file: Path) -> str:
    """Return the stack of the thread that the first line names."""
    main, _, answers = file.read_text(encoding="utf-8", errors="replace").partition("\n")
    match = re.search(rf"hread {main}[^\n]*\n((?: .*\n?)*)", answers)
    return match[1].rstrip() if match is not None else ""


def _file(folder: Path, rank: int) -> Path:
    return folder / f"stack-{rank}.txt"
