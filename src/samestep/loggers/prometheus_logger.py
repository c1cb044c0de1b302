"""Prometheus: a text file of the latest numbers, as node_exporter's textfile collector reads it.

The format: https://prometheus.io/docs/instrumenting/exposition_formats (text-based). `args: {file: PATH}`: where it
stands; otherwise metrics.prom in the run's folder.
"""

import re
import time
from collections.abc import Mapping
from pathlib import Path

from samestep.errors import UserError
from samestep.job import Log
from samestep.loggers.base import LoggedRun, Logger

_APART = 1.0  # seconds between two writes: scrapes are rarer
_SUFFIX = ".prom"  # of files that the collector reads


class Prometheus(Logger):
    """Replaces the file at most once a second, and at the end; a reader never sees half of it."""

    def __init__(self, settings: Log, run: LoggedRun) -> None:
        self._file = Path(settings.args.get("file", run.folder / "metrics.prom"))
        self._labels = f'{{run="{_escaped(settings.name or run.name)}"}}'
        self._values: dict[str, float] = {}
        self._written = 0.0
        self._write()

    @classmethod
    def check(cls, settings: Log, environ: Mapping[str, str]) -> None:
        """Raise UserError for a file that the collector would not read."""
        file = settings.args.get("file")
        if file is not None and (not isinstance(file, str) or not file.endswith(_SUFFIX)):
            raise UserError(
                f"run.log: prometheus has args.file {file!r}; use a path whose name ends in {_SUFFIX}, "
                "which node_exporter reads"
            )

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        named = {re.sub(r"[^a-zA-Z0-9_]", "_", name): value for name, value in values.items()}
        self._values |= {"step": float(step), **named}
        if time.monotonic() - self._written >= _APART:
            self._write()

    def text(self, step: int, name: str, text: str) -> None:
        """There are no texts in the format."""

    def close(self, *, failed: bool) -> None:
        self._values["failed"] = float(failed)
        self._write()

    def _write(self) -> None:
        self._written = time.monotonic()
        lines = list[str]()
        for name, value in sorted({**self._values, "written_seconds": time.time()}.items()):
            lines += [f"# TYPE samestep_{name} gauge", f"samestep_{name}{self._labels} {value!r}"]
        new = self._file.with_name(f"{self._file.name}.new")
        new.write_text("\n".join(lines) + "\n", encoding="utf-8")
        new.replace(self._file)


def _escaped(label: str) -> str:
    """A label's value in the format."""
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
