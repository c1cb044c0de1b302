"""The one progress bar: loss, learning rate, samples/s and time left; nothing where nobody looks."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)


class Bar:
    """A bar over `total` things, `first` of them done. Quiet unless `shown` and standard error is a terminal.

    With `lines` each `say` is a line where standard error is no terminal, such as a file or a job's log.
    """

    def __init__(self, title: str, total: int, *, first: int = 0, shown: bool = True, lines: bool = False) -> None:
        self._lines = lines and shown and not sys.stderr.isatty()
        self._title = title
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=Console(stderr=True),
            disable=not (shown and sys.stderr.isatty()),
            refresh_per_second=4,
        )
        self._task = self._progress.add_task(title, total=total, completed=first, note="")
        self._samples = 0
        self._began = time.perf_counter()

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def advance(self, note: str = "") -> None:
        self._progress.update(self._task, advance=1, note=note)

    def say(self, note: str) -> None:
        """Say what is under way."""
        self._progress.update(self._task, note=note)
        if self._lines:
            task = self._progress.tasks[0]
            seconds = time.perf_counter() - self._began
            place = f"{int(task.completed) + 1} of {int(task.total or 0)}, {seconds:.0f} s"
            print(f"{self._title}: {note} ({place})", file=sys.stderr, flush=True)

    @contextmanager
    def part(self, title: str, total: int) -> Iterator[Callable[[], None]]:
        """A second bar below the first, for a work within the work; gives what advances it."""
        task = self._progress.add_task(title, total=total, note="")
        try:
            yield lambda: self._progress.advance(task)
        finally:
            self._progress.remove_task(task)

    def step(self, *, loss: float, lr: float, samples: int, terms: Mapping[str, float] | None = None) -> None:
        """Advance by a training step of so many samples. `terms`: of which its loss is put together."""
        self._samples += samples
        speed = self._samples / (time.perf_counter() - self._began)
        parts = ", ".join(f"{name} {value:.4f}" for name, value in (terms or {}).items())
        self.advance(f"loss {loss:.4f}{f' ({parts})' if parts else ''} lr {lr:.1e} {speed:,.0f} samples/s")
