"""Progress where standard error is no terminal: whole lines of what runs, how far it is, and that it still runs.

`running` names the work of this process, `phase` a part of it; `progress.bars` adds steps. One process of a job
writes: the one that the user started, and rank 0, whose lines its launcher prints. While nothing new is to be said, a
thread says each interval what still runs. What can't be written is left out: progress must not end the work.
"""

import io
import math
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass

from samestep import environment
from samestep.durations import duration_text, parse_duration
from samestep.errors import UserError

NONE = "none"  # for no lines
EVERY = 30.0  # seconds
LEAST, MOST = 0.1, 86_400.0

_FIRST = 10.0  # seconds to the first line at the latest: a mistake is usually found before, and has one message
_NEWS = 0.8  # of the interval: steps come before the thread says that the work still runs
_SOON = 1.0  # seconds between the first two lines of steps; doubles up to the interval
_OTHERS = 2.0  # seconds longer, at most, that a process waits for the next line of ranks that it has started
_WAIT = 0.01  # seconds between two looks of the thread, at least


def interval(text: str) -> float | None:
    """Return the seconds of a text such as 30s; None for "none". Raises ValueError for any other text."""
    if text.strip() == NONE:
        return None
    seconds = parse_duration(text)
    if seconds is None or not LEAST <= seconds <= MOST:
        raise ValueError(f"use {NONE}, or a time from {duration_text(LEAST)} to {MOST / 3600:g}h")
    return seconds


def clock(seconds: float) -> str:
    """Return seconds as 1:02, or 1:01:02 from an hour on."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def on_terminal() -> bool:
    """Whether standard error is a terminal on which a line can be drawn again."""
    try:
        return sys.stderr is not None and sys.stderr.isatty() and environment.terminal_draws()
    except ValueError:  # it is closed
        return False


@dataclass(frozen=True, kw_only=True)
class _Phase:
    """A part of the work that runs now."""

    text: Callable[[], str]  # what a line says of it
    since: Callable[[], float]  # when it began, by the monotonic clock


class Writer:
    """Writes the lines of one process. Its methods may be called by the thread that made it."""

    def __init__(self, every: float) -> None:
        self._every = every
        self._lock = threading.Lock()
        self._thread_id = threading.get_ident()
        self._titles: list[str] = []
        self._phases: list[_Phase] = []
        self._said: dict[str, float] = {}  # when phases had a line, by title and key
        self._began = self._last = time.monotonic()  # the last: when a line came
        self._gap = min(_SOON, every * _NEWS)
        self._news_at = -math.inf  # when a line of steps came
        self._descriptor: int | None = None
        self.mutes = 0
        self._others = 0  # phases in which other processes write
        self._heard = False  # whether one has, since the last phase began
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep_saying, name="progress", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    @property
    def is_usable(self) -> bool:
        """Whether the calling thread may say something."""
        return not self.mutes and threading.get_ident() == self._thread_id

    def state(self) -> str:
        """What the whole work does while no phase of it is named."""
        return "running" if self._said else "starting"  # a line that it still starts is none of a phase

    @contextmanager
    def titled(self, title: str) -> Iterator[None]:
        """Begin lines with this title, such as the command's name, unless the one around it says more."""
        around = self._titles[-1] if self._titles else ""
        self._titles.append(around if around.startswith(title) else title)
        try:
            yield
        finally:
            self._titles.pop()

    @contextmanager
    def within(
        self, text: Callable[[], str], *, since: Callable[[], float] | None = None, others: bool = False
    ) -> Iterator[None]:
        """Context of a phase; `others`: processes that this one has started write in it."""
        began = time.monotonic()
        phase = _Phase(text=text, since=since or (lambda: began))
        self._heard = False
        self._phases.append(phase)
        self._others += others
        try:
            yield
        finally:
            self._others -= others
            self._phases.remove(phase)

    def say(self, text: str, *, once: str | None = None) -> None:
        """Write a line. `once`: a key; lines of the same key come at most once an interval."""
        key, now = f"{self._titles[-1]}: {text if once is None else once}", time.monotonic()
        if now - self._said.get(key, -math.inf) < self._every * _NEWS:
            return
        self._said[key] = now
        with self._lock:
            self._write(text)

    def is_due(self) -> bool:
        """Whether steps should be told now."""
        return time.monotonic() - self._news_at >= self._gap

    def news(self, text: str) -> None:
        """Write a line of steps, and wait longer for the next."""
        with self._lock:
            first = self._news_at == -math.inf
            self._news_at = time.monotonic()
            if not first:
                self._gap = min(2 * self._gap, self._every * _NEWS)
            self._write(text)

    def heard(self) -> None:
        """Take note that another process has written."""
        self._last, self._heard = time.monotonic(), True

    @contextmanager
    def muted(self, descriptor: int | None = None) -> Iterator[None]:
        """Say only, and on `descriptor` if there is one, that the current phase still runs."""
        before, self._descriptor = self._descriptor, descriptor
        self.mutes += 1
        try:
            yield
        finally:
            self.mutes -= 1
            self._descriptor = before

    def _keep_saying(self) -> None:
        """Thread: says what still runs when there was no line for the interval."""
        while not self._over.wait(max(_WAIT, self._last + self._limit() - time.monotonic())):
            with self._lock:
                now = time.monotonic()
                if now - self._last >= self._limit():
                    phase = self._phases[-1]
                    self._write(f"still {phase.text()} ({now - phase.since():,.0f} s)")

    def _limit(self) -> float:
        """Seconds without a line after which the thread writes one."""
        if self._last == self._began:
            return min(_FIRST, self._every)
        return self._every + (min(_OTHERS, self._every) if self._others and self._heard else 0)

    def _write(self, text: str) -> None:
        self._last = time.monotonic()
        title = self._titles[-1] if self._titles else "samestep"
        _write(" ".join(f"{title}: {text}".split("\n")) + "\n", self._descriptor)


def _write(line: str, descriptor: int | None) -> None:
    """Write a line to standard error at once, unless its reader is gone, or slow, or its disk is full."""
    stream = sys.stderr
    with suppress(OSError, ValueError):  # ValueError: it is closed
        if descriptor is None and type(stream) is io.TextIOWrapper:
            stream.flush()
            descriptor = stream.fileno()
        if descriptor is not None:
            # Not by the stream, which would keep what it can't write and fail with it at the end of the process.
            if _takes(descriptor):
                os.write(descriptor, line.encode(errors="backslashreplace"))
        elif stream is not None:  # a notebook's, or a test's
            stream.write(line)
            stream.flush()


def _takes(descriptor: int) -> bool:
    """Whether a line can be written without waiting for a reader."""
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return bool(poll.poll(0))


_writer: Writer | None = None


# The command that the user called, or the function: lines of what it does inside begin with its name.
_work: ContextVar[str | None] = ContextVar("work", default=None)


def _forget() -> None:
    """In a forked process: it has no thread that writes, and is another part of the job."""
    global _writer
    _writer = None
    _work.set(None)


os.register_at_fork(after_in_child=_forget)


def writer() -> Writer | None:
    """Return this process's writer for the calling thread; None where it writes no lines."""
    return _writer if _writer is not None and _writer.is_usable else None


def work(otherwise: str) -> str:
    """Return the name of the command that runs, such as check, which takes the steps of verify; else `otherwise`."""
    return _work.get() or otherwise


@contextmanager
def working(name: str | None) -> Iterator[None]:
    """Context of a part of a command's work, in a process that the command has started."""
    token = _work.set(name)
    try:
        yield
    finally:
        _work.reset(token)


@contextmanager
def running(title: str) -> Iterator[None]:
    """Context of the work of this process, or of a part of it with a title of its own, such as a bar or a rank.

    The outermost one names the work, reads the interval, and starts the thread. Raises UserError for an interval that
    is none.
    """
    with working(work(title.partition(":")[0])), _titled(title):
        yield


@contextmanager
def _titled(title: str) -> Iterator[None]:
    """Context in which lines have this title, by a thread that is started where there is none."""
    global _writer
    if _writer is not None:
        current = writer()
        if current is None:
            yield
        else:
            with current.titled(title):
                yield
        return
    every = _wanted()
    if every is None or not environment.is_first_rank() or environment.bar_file() is not None or on_terminal():
        yield
        return
    _writer = created = Writer(every)
    with created.titled(title), created.within(created.state):
        created.start()
        try:
            yield
        finally:
            created.stop()
            _writer = None


@contextmanager
def command(title: str) -> Iterator[None]:
    """Context of a function that users call as well as commands, whose title stays where one is around it."""
    with working(work(title)), nullcontext() if _writer is not None else running(title):
        yield


def _wanted() -> float | None:
    """Return the interval in seconds; None for no lines. Raises UserError."""
    text = environment.progress_interval()
    try:
        return EVERY if text is None else interval(text)
    except ValueError as error:
        raise UserError(f'{environment.PROGRESS} is "{text}"; {error}') from None


@contextmanager
def phase(text: str, *, once: str | None = None, others: bool = False) -> Iterator[None]:
    """Context of a phase, whose line comes at its beginning.

    `once`: a key for phases that come often, of which at most one an interval has a line. `others`: other processes
    that this one has started write meanwhile.
    """
    current = writer()
    if current is None:
        yield
        return
    current.say(text, once=once)
    with current.within(lambda: text, others=others):
        yield


@contextmanager
def status(
    text: Callable[[], str], *, since: Callable[[], float] | None = None, others: bool = False
) -> Iterator[None]:
    """Context of a phase without a line at its beginning.

    `text` is called for lines that it still runs, and `since` for when what it names began.
    """
    current = writer()
    if current is None:
        yield
        return
    with current.within(text, since=since, others=others):
        yield


def say(text: str, *, once: str | None = None) -> None:
    """Write a line; `once` as in `phase`."""
    if (current := writer()) is not None:
        current.say(text, once=once)


def heard() -> None:
    """Take note that a rank's output was printed: the job shows that it still runs."""
    if _writer is not None:
        _writer.heard()


@contextmanager
def muted(descriptor: int | None = None) -> Iterator[None]:
    """Context in which nothing here has a line, but that the phase around it still runs.

    `descriptor`: of the standard error that lines go to meanwhile.
    """
    if (current := writer()) is None:
        yield
    else:
        with current.muted(descriptor):
            yield
