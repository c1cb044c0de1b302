"""Times whole commands from their start to their end, of this version and an earlier one, in turns.

    python benchmarks/start_up.py [--before REVISION] [--runs 3] [--docs]

The earlier revision, by default the last before time to the first step was worked on, is unpacked into a folder of
its own, and each version runs its own examples. A first run of every command fills the caches and does not count; the
figures are medians of the others. CPU seconds are those of all processes of the command: this program adopts those
that outlive it, such as the server from which ranks are forked (Linux). A command that the earlier version hasn't has
figures of this one only. `--docs` writes the table of docs/start-up.md
and docs/zh/start-up.md.
"""

import argparse
import ctypes
import io
import os
import resource
import statistics
import subprocess
import sys
import tarfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

from page_parts import MeasuredTable, markdown_table
from rich.console import Console
from rich.progress import Progress

ROOT = Path(__file__).resolve().parents[1]
BEFORE = "7cdea32b^"
COMMANDS = (
    "train examples/digits.yaml --layout single --set recipe.epochs=1",
    "train examples/digits.yaml --layout dp2 --set recipe.epochs=1",
    "train examples/reviews.yaml --layout dp2 --set recipe.steps=10 --set recipe.epochs=null",
    "verify examples/own_task.yaml --layout dp2",
    "translate examples/translate/ds_config.json",
)
TIME_LIMIT = 600.0  # seconds of a command
VERSIONS = ("before", "today")
FIGURES = ("wall", "cpu")
SET_CHILD_SUBREAPER = 36  # of prctl(2)
ORPHANS_LIMIT = 30.0  # seconds in which they have to end


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", default=BEFORE, metavar="REVISION")
    parser.add_argument("--runs", type=int, default=3, help="that count, of each command and version")
    parser.add_argument("--commands", nargs="+", default=COMMANDS, help="words after samestep")
    parser.add_argument("--docs", action="store_true", help="write the table into the docs")
    options = parser.parse_args()
    if ctypes.CDLL(None, use_errno=True).prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise SystemExit(f"processes that outlive a command can't be adopted: {os.strerror(ctypes.get_errno())}")
    with TemporaryDirectory(prefix="samestep-start-up-") as folder:
        unpack(options.before, Path(folder))
        places = {"before": Path(folder), "today": ROOT}
        rows = measured(options.commands, places, options.runs)
    print(markdown(rows, "en"))
    if options.docs:
        TABLE.keep(rows)


def unpack(revision: str, folder: Path) -> None:
    archive = subprocess.run(
        ["git", "archive", revision, "src", "examples"], cwd=ROOT, capture_output=True, check=True
    )
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
        tar.extractall(folder, filter="data")


def measured(commands: Sequence[str], places: Mapping[str, Path], runs: int) -> list[dict[str, Any]]:
    rows = []
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("runs", total=len(commands) * (runs + 1))
        for command in commands:
            found: dict[str, list[tuple[float, float]]] = {version: [] for version in places}
            for _ in range(runs + 1):
                for version, place in places.items():  # in turns, so that other load affects both
                    if (seconds := seconds_of(command, place)) is not None:
                        found[version].append(seconds)
                progress.advance(bar)
            rows.append({"command": command, **{version: medians(each[1:]) for version, each in found.items()}})
    return rows


def seconds_of(command: str, place: Path) -> tuple[float, float] | None:
    """Wall and CPU seconds of a command of the samestep in a folder; None if that samestep hasn't the command."""
    environ = {**os.environ, "PYTHONPATH": str(place / "src"), "PYTHONWARNINGS": "ignore"}
    with TemporaryDirectory(prefix="samestep-run-") as folder:
        words = command.split()
        if words[0] == "train":
            words += ["--set", f"run.folder={folder}/run"]
        cpu, began = _cpu(), time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "samestep", *words],
            cwd=place,
            env=environ,
            capture_output=True,
            text=True,
            timeout=TIME_LIMIT,
            check=False,
        )
        wall = time.perf_counter() - began
        wait_for_orphans()
    if "invalid choice" in done.stderr:
        return None
    if done.returncode:
        raise SystemExit(f"samestep {command} of {place} failed:\n{done.stderr[-2000:]}")
    return wall, _cpu() - cpu


def wait_for_orphans() -> None:
    """Wait for the processes that outlived a command, so that their CPU seconds count."""
    until = time.monotonic() + ORPHANS_LIMIT
    while time.monotonic() < until:
        try:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.01)
        except ChildProcessError:
            return
    raise SystemExit(f"processes of a command are still there {ORPHANS_LIMIT:.0f} s after its end")


def _cpu() -> float:
    """CPU seconds of all children that have ended, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def medians(found: Sequence[tuple[float, float]]) -> dict[str, float]:
    return {
        name: statistics.median(each) for name, each in zip(FIGURES, zip(*found, strict=True), strict=False) if found
    }


def markdown(rows: Sequence[Mapping[str, Any]], language: str) -> str:
    lines = [
        [
            f"`{row['command']}`",
            *(
                SECONDS[language].format(row[version][figure]) if figure in row[version] else ""
                for figure in FIGURES
                for version in VERSIONS
            ),
        ]
        for row in rows
    ]
    return markdown_table(TITLES[language], lines, align="l")


SECONDS = {"en": "{:.1f} s", "zh": "{:.1f} 秒"}
TITLES: Mapping[str, Sequence[str]] = {
    "en": ("command", "wall, first version", "wall, today", "CPU, first version", "CPU, today"),
    "zh": ("命令", "墙钟，最初版本", "墙钟，现在", "CPU，最初版本", "CPU，现在"),
}
TABLE = MeasuredTable(name="start-up", part="benchmarks/start_up.py", page="docs/start-up.md", text=markdown)


if __name__ == "__main__":
    main()
