"""Ranks that try what may crash them or make them hang: in processes of their own, which end with the trial.

`python -m samestep.comm_bench.try_ranks FUNCTION RANKS ARGUMENTS` is the process that starts the ranks. FUNCTION is
called in each of them; it is written as module:name, and its arguments as a list in JSON. Ranks note what they do in
files (`Notes`), a line of JSON each time, which stay where a rank crashes or is ended.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from samestep import subprocess_group
from samestep.subprocess_group import CommandOutcome

_MODULE = "samestep.comm_bench.try_ranks"


def run_ranks(
    function: Callable[..., None], arguments: tuple[str | int | float, ...], ranks: int, *, limit: float
) -> CommandOutcome:
    """Call a module-level function in each of `ranks` new ranks; after `limit` seconds all of them are ended."""
    name = f"{function.__module__}:{function.__qualname__}"
    command = [sys.executable, "-m", _MODULE, name, str(ranks), json.dumps(arguments)]
    return subprocess_group.run(command, limit=limit)


class Notes:
    """What a rank notes, as lines of JSON: in a list and, if given, in a file."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self.lines: list[dict[str, Any]] = []

    def write(self, line: dict[str, Any]) -> None:
        """Append a line immediately, since what is tried next may end the process."""
        self.lines.append(line)
        if self._file is not None:
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


def read_notes(file: Path) -> list[dict[str, Any]]:
    """Read the complete lines of a notes file; the last one may be truncated. Empty if the file is missing."""
    if not file.is_file():
        return []
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def main(function: str, ranks: str, arguments: str) -> None:
    """Start the ranks, and wait for them."""
    from samestep.launch import local  # only this process starts any

    local.start(resolve_name(function), tuple(json.loads(arguments)), int(ranks))


if __name__ == "__main__":
    main(*sys.argv[1:])
