"""Runs of a method's job: by the method's own command, or by ranks forked from one server that all runs share.

Ranks of samestep's own engine are forked from the comparing process: new ones for each run, forked as those of
`samestep train` are, which take the steps that they take. What that leaves out is a process that imports PyTorch and
reads the data only to start them, and another server.
"""

import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import IO

from samestep import environment, subprocess_group
from samestep.api import train_job
from samestep.comparison.methods import SAMESTEP, ComparedMethod
from samestep.errors import NonFiniteError, RankFailedError, UserError
from samestep.job import Job
from samestep.jobfile import to_run
from samestep.progress import phases
from samestep.subprocess_group import CommandOutcome


class _LimitError(Exception):
    """A run has exceeded its time limit."""


def run_method(method: ComparedMethod, job: Job, place: Path, *, limit: float) -> tuple[Path, CommandOutcome]:
    """Run a method's job for `limit` seconds at most, and return its folder as well; `place` is an empty folder."""
    folder = place / "run"
    if is_forked(method):
        return folder, run_forked(job, folder, limit=limit)
    file = place / "job.yaml"
    file.write_text(to_run(job), encoding="utf-8")
    command = method.start.command(file, folder, method.sizes.size)
    return folder, subprocess_group.run(command, limit=limit)


def is_forked(method: ComparedMethod) -> bool:
    """Whether a method's ranks are forked from here: several ranks of the native engine, and an interval timer.

    A single process would train in this one and leave its state here; other engines keep state in the process that
    starts their ranks.
    """
    several = method.sizes.size > 1
    clock = hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()
    return method.start == SAMESTEP and method.engine == "native" and several and clock


def run_forked(job: Job, folder: Path, *, limit: float) -> CommandOutcome:
    """Train a job into a folder, for `limit` seconds at most. Raises InterruptedJobError on a signal."""
    with tempfile.TemporaryFile() as output:
        began = time.perf_counter()
        code: int | None = 0
        message = ""
        try:
            with _output_into(output), _limited(limit):
                train_job(replace(job, run=replace(job.run, folder=folder)))
        except _LimitError:
            code = None
        except UserError as error:
            code, message = 2, f"samestep: {error}\n"
        except (RankFailedError, NonFiniteError) as error:
            code, message = 1, f"samestep: {error}\n"
        seconds = time.perf_counter() - began
        output.seek(0)
        return CommandOutcome(
            code=code, seconds=seconds, output=output.read().decode("utf-8", errors="replace") + message
        )


@contextmanager
def _output_into(file: IO[bytes]) -> Iterator[None]:
    """Redirect the output of this process and its children to a file."""
    kept = {number: os.dup(number) for number in (1, 2)}
    try:
        for number in kept:
            os.dup2(file.fileno(), number)
        # Progress stays where it is shown: that the run is still under way, and nothing else of it.
        with environment.progress_every(phases.NONE), phases.muted(kept[2]):
            yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for number, before in kept.items():
            os.dup2(before, number)
            os.close(before)


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raise _LimitError after `seconds` of wall-clock time."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise _LimitError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
