"""Progress bars on the terminal of the process that the user started, also from ranks whose output a launcher prints.

A launcher that prints its ranks' output names a file in the environment; rank 0 draws its bar into that file, and the
launcher copies the file's last state below the lines that it prints (`launch/logs.py`). Without a terminal a bar is
lines (`progress.phases`).
"""

import io
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from samestep import environment
from samestep.progress import phases
from samestep.progress.phases import Writer, clock


class _Shared(io.TextIOBase):
    """A file that the launcher shows on its terminal; truncated before it gets large."""

    _MOST = 1 << 16  # bytes

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8")

    def write(self, text: str) -> int:
        """Write, after truncating a file that has grown large: the launcher reads only its last state."""
        if self._file.tell() > self._MOST:
            self._file.seek(0)
            self._file.truncate()
        return self._file.write(text)

    def flush(self) -> None:
        if not self._file.closed:
            self._file.flush()

    def close(self) -> None:
        self._file.close()
        super().close()


def _terminal() -> Console | None:
    """The console that progress bars are drawn on; None without a terminal."""
    drawn_to = environment.bar_file()
    if drawn_to is None:
        return Console(stderr=True) if phases.on_terminal() else None
    path, columns = drawn_to
    shared: Any = _Shared(path)
    return Console(file=shared, force_terminal=True, width=columns)


class Bar:
    """A progress bar over `total` items, `first` of them done; silent unless `shown`.

    Where standard error is no terminal, such as a file or a job's log, it is lines, of which steps have one every so
    often. They call an item `unit`.
    """

    def __init__(self, title: str, total: int, *, first: int = 0, shown: bool = True, unit: str = "") -> None:
        console = _terminal() if shown else None
        self._title = title
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=console or Console(stderr=True),
            disable=console is None,
            refresh_per_second=4,
        )
        self._task = self._progress.add_task(title, total=total, completed=first, note="")
        self._lines = _Lines(total, first, unit) if shown and console is None else None
        self._with = ExitStack()
        self._samples = 0
        self._began = time.perf_counter()

    def __enter__(self) -> Self:
        self._progress.start()
        if self._lines is not None:
            self._with.enter_context(phases.running(self._title))
            self._with.enter_context(phases.status(self._lines.status, since=self._lines.since))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._with.close()
        self._progress.stop()
        if isinstance(self._progress.console.file, _Shared):
            self._progress.console.file.close()

    def advance(self, note: str = "", *, told: str = "") -> None:
        """Advance by one item. `note` stands in the bar and in lines, `told` in lines alone."""
        if self._lines is not None:
            self._lines.advance(note or told)
        else:
            self._progress.update(self._task, advance=1, note=note)

    def say(self, note: str) -> None:
        """Show a note on what is running."""
        self._progress.update(self._task, note=note)
        if self._lines is not None:
            self._lines.say(note)

    @contextmanager
    def part(self, title: str, total: int) -> Iterator[Callable[[], None]]:
        """Show a second bar, for a subtask, below the first; yields the function that advances it."""
        if self._lines is not None:
            part = _Lines(total, 0, "")
            with phases.status(lambda: f"at {title} {part.place}"):
                yield part.count
            return
        task = self._progress.add_task(title, total=total, note="")
        try:
            yield lambda: self._progress.advance(task)
        finally:
            self._progress.remove_task(task)

    def step(self, *, loss: float, lr: float, samples: int, terms: Mapping[str, float] | None = None) -> None:
        """Advance by one training step of `samples` samples. `terms`: the terms of its loss by name."""
        if self._lines is not None:
            self._lines.step(loss, samples, terms or {})
            return
        if self._progress.disable:
            return
        self._samples += samples
        speed = self._samples / (time.perf_counter() - self._began)
        self.advance(f"{_loss(loss, terms or {})} lr {lr:.1e} {speed:,.0f} samples/s")


def _loss(loss: float, terms: Mapping[str, float]) -> str:
    """A loss as text, with its terms."""
    parts = ", ".join(f"{name} {value:.4f}" for name, value in terms.items())
    return f"loss {loss:.4f}{f' ({parts})' if parts else ''}"


class _Lines:
    """What lines tell of one bar: how far it is, since when, and how long the rest will take."""

    def __init__(self, total: int, first: int, unit: str) -> None:
        self._total = total
        self._first = self._done = first
        self._unit = f"{unit} " if unit else ""
        self._note = ""
        self._began = self._moved_at = time.monotonic()
        self._first_at = math.inf  # end of the first item, which may take longer than the others
        self._told_at = self._began  # of the last line of steps, as are the samples since
        self._samples = 0
        self._was_finite = True

    @property
    def place(self) -> str:
        return f"{self._done:,}/{self._total:,}"

    def status(self) -> str:
        """What runs now, for a line that it still does."""
        if self._note:
            return f"{self._note} ({self._number} of {self._total:,})"
        return f"{'in' if self._unit else 'at'} {self._unit}{self._number}/{self._total:,}"

    def since(self) -> float:
        """When the current item began."""
        return self._moved_at

    @property
    def _number(self) -> str:
        return f"{min(self._done + 1, self._total):,}"

    def count(self) -> None:
        self._done += 1
        self._moved_at = time.monotonic()
        self._first_at = min(self._first_at, self._moved_at)

    def say(self, note: str) -> None:
        """Write a line on what begins."""
        self._note, self._moved_at = note, time.monotonic()
        phases.say(f"{note} ({self._number} of {self._total:,}, {time.monotonic() - self._began:.0f} s)")

    def advance(self, told: str) -> None:
        """Count an item, and write a line if one is due, unless what runs has lines of its own."""
        self.count()
        if (told or self._unit) and (writer := phases.writer()) is not None and writer.is_due():
            self._tell(writer, told)

    def step(self, loss: float, samples: int, terms: Mapping[str, float]) -> None:
        """Count a step, and write a line if one is due, or it is the first, the last, or newly not finite."""
        self.count()
        self._samples += samples
        writer = phases.writer()
        if writer is None:
            return
        spoilt, self._was_finite = self._was_finite and not math.isfinite(loss), math.isfinite(loss)
        ends = self._done in (self._first + 1, self._total)
        if spoilt or ends or writer.is_due():
            speed = self._samples / max(self._moved_at - self._told_at, 1e-9)
            self._told_at, self._samples = self._moved_at, 0
            self._tell(writer, f"{_loss(loss, terms)}, {speed:,.{1 if speed < 100 else 0}f} samples/s")

    def _tell(self, writer: Writer, told: str) -> None:
        parts = [f"{self._unit}{self.place}", told, f"{clock(self._moved_at - self._began)} elapsed"]
        later = self._done - self._first - 1  # items after the first
        if later > 0 and self._done < self._total:
            left = (self._moved_at - self._first_at) / later * (self._total - self._done)
            parts.append(f"{clock(left)} left")
        writer.news(", ".join(part for part in parts if part))
