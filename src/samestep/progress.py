"""Progress bars on the terminal of the process that the user started, also from ranks whose output a launcher prints.

A launcher that prints its ranks' output names a file in the environment; rank 0 draws its bar into that file, and the
launcher copies the file's last state below the lines that it prints (`launch/logs.py`).
"""

import io
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from samestep import environment


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
        return Console(stderr=True) if sys.stderr.isatty() else None
    path, columns = drawn_to
    shared: Any = _Shared(path)
    return Console(file=shared, force_terminal=True, width=columns)


class Bar:
    """A progress bar over `total` items, `first` of them done; silent unless `shown` and stderr is a terminal.

    With `lines`, each `say` prints a line where stderr is not a terminal, such as a file or a job's log.
    """

    def __init__(self, title: str, total: int, *, first: int = 0, shown: bool = True, lines: bool = False) -> None:
        console = _terminal() if shown else None
        self._lines = lines and shown and console is None
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
        self._samples = 0
        self._began = time.perf_counter()

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
        if isinstance(self._progress.console.file, _Shared):
            self._progress.console.file.close()

    def advance(self, note: str = "") -> None:
        self._progress.update(self._task, advance=1, note=note)

    def say(self, note: str) -> None:
        """Show a note on what is running."""
        self._progress.update(self._task, note=note)
        if self._lines:
            task = self._progress.tasks[0]
            seconds = time.perf_counter() - self._began
            place = f"{int(task.completed) + 1} of {int(task.total or 0)}, {seconds:.0f} s"
            print(f"{self._title}: {note} ({place})", file=sys.stderr, flush=True)

    @contextmanager
    def part(self, title: str, total: int) -> Iterator[Callable[[], None]]:
        """Show a second bar, for a subtask, below the first; yields the function that advances it."""
        task = self._progress.add_task(title, total=total, note="")
        try:
            yield lambda: self._progress.advance(task)
        finally:
            self._progress.remove_task(task)

    def step(self, *, loss: float, lr: float, samples: int, terms: Mapping[str, float] | None = None) -> None:
        """Advance by one training step of `samples` samples. `terms`: the terms of its loss by name."""
        if self._progress.disable and not self._lines:
            return
        self._samples += samples
        speed = self._samples / (time.perf_counter() - self._began)
        parts = ", ".join(f"{name} {value:.4f}" for name, value in (terms or {}).items())
        self.advance(f"loss {loss:.4f}{f' ({parts})' if parts else ''} lr {lr:.1e} {speed:,.0f} samples/s")
