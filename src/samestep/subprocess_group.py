"""Runs a command in its own session with a time limit, and ends all of its processes."""

import os
import re
import signal
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType

import psutil

from samestep import environment
from samestep.errors import InterruptedJobError
from samestep.variables import without_values

_GRACE = 5.0  # seconds to end in order, for a launcher to end its ranks
PREFIX = "samestep: "  # prefix of a message of samestep's
_NUMBER = re.compile(r"\d+(\.\d+)?")


def distinct(messages: Iterable[str]) -> tuple[str, ...]:
    """Drop repeated messages: of those that differ in their numbers alone, the first one stays."""
    first_messages: dict[str, str] = {}
    for message in messages:
        first_messages.setdefault(_NUMBER.sub("", message), message)
    return tuple(first_messages.values())


@dataclass(frozen=True, kw_only=True)
class CommandOutcome:
    """How a command ended."""

    code: int | None  # None: it was stopped at its time limit
    seconds: float  # wall time, start-up and all
    output: str  # what it and its ranks printed, without what the variables of the job file hold

    def __post_init__(self) -> None:
        object.__setattr__(self, "output", without_values(self.output))

    @property
    def remarks(self) -> tuple[str, ...]:
        """The messages that samestep itself printed, such as that shared memory is not used; each once."""
        lines = self.output.splitlines()
        return distinct(line.removeprefix(PREFIX) for line in lines if line.startswith(PREFIX))


def run(
    command: Sequence[str], *, limit: float, meanwhile: Callable[[subprocess.Popen[bytes]], None] | None = None
) -> CommandOutcome:
    """Run a command to its end, or for `limit` seconds; `meanwhile` is called once it has been started."""
    mark = uuid.uuid4().hex
    with tempfile.TemporaryFile() as output:
        began = time.perf_counter()
        process: subprocess.Popen[bytes] | None = None
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment.marked(mark),
                start_new_session=True,
            )
            if meanwhile is not None:
                meanwhile(process)
            code = process.wait(timeout=max(0.0, limit - (time.perf_counter() - began)))
        except subprocess.TimeoutExpired:
            code = None
        finally:
            seconds = time.perf_counter() - began
            _end(process, mark)
        output.seek(0)
        return CommandOutcome(code=code, seconds=seconds, output=output.read().decode("utf-8", errors="replace"))


@contextmanager
def started(command: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A command in its own session, with pipes to it; it and all of its processes end with the block."""
    mark = uuid.uuid4().hex
    process: subprocess.Popen[bytes] | None = None
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment.marked(mark),
            start_new_session=True,
        )
        yield process
    finally:
        if process is not None:
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with suppress(BrokenPipeError):
                        pipe.close()
        _end(process, mark)


def _end(process: subprocess.Popen[bytes] | None, mark: str) -> None:
    """End all processes of a run: launchers put ranks into sessions of their own, so its process group is not all.

    `process` is None if a signal came while it was being started.
    """
    if process is not None:
        if process.poll() is None:
            _signal_group(process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=_GRACE)
        _signal_group(process.pid, signal.SIGKILL)
        process.wait()
    until = time.monotonic() + _GRACE
    while (left := _marked(mark)) and time.monotonic() < until:
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _signal_group(leader: int, number: signal.Signals) -> None:
    """Send a signal to a command's process group."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


def _marked(mark: str) -> list[int]:
    """Processes whose environment holds a run's mark; where the system doesn't show environments, none."""
    processes = psutil.process_iter(["environ"])  # None where it may not be read
    return [process.pid for process in processes if environment.mark_of(process.info["environ"] or {}) == mark]


@contextmanager
def signals_raise() -> Iterator[None]:
    """SIGTERM and SIGHUP raise InterruptedJobError, so that a run that is under way is ended first."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise InterruptedJobError(number)

    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
