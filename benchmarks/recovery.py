"""Recovery after a rank is killed during a training, under torchrun and under samestep: whether, and how fast.

    python benchmarks/recovery.py --runs 8 [--docs]

Both train a small net on two ranks, in steps of at least 20 ms that are all saved, with three restarts. Rank 1 is
killed by SIGKILL after some steps. A run has recovered if it completes; restarts beyond the one that is needed count
as wasted. Seconds are from the kill to the next step of a rank. `--docs` writes the table of docs/faults.md and
docs/zh/faults.md.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

import yaml
from notes import noted
from page_parts import MeasuredTable, markdown_table
from rich.console import Console
from rich.table import Table

from samestep import subprocess_group

HERE = Path(__file__).resolve().parent
STEPS = 40
BATCH = 32
STEP_SECONDS = 0.02  # at least, so that a kill hits the intended step
KILLED_AFTER = 15
RESTARTS = 3

Command = Callable[[Path], Sequence[str]]


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training in which a rank was killed."""

    recovered: bool
    restarts: int
    seconds: float | None  # from the kill to the next step


def torchrun(folder: Path) -> Sequence[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    values = ["--steps", str(STEPS), "--batch", str(BATCH), "--step-seconds", str(STEP_SECONDS)]
    return [*launcher, f"--max-restarts={RESTARTS}", str(HERE / "noted_plain.py"), str(folder), *values]


def samestep(folder: Path) -> Sequence[str]:
    job = {
        "recipe": {
            "task": f"{HERE}/noted_task.py:Slow",
            "args": {"folder": str(folder), "seconds": STEP_SECONDS},
            "batch": BATCH,
            "steps": STEPS,
        },
        "run": {
            "layout": "dp2",
            "threads": 1,
            "folder": str(folder / "run"),
            "log": (),
            "max_restarts": RESTARTS,
            "checkpoint": {"every": 1},
        },
    }
    file = folder / "job.yaml"
    file.write_text(yaml.safe_dump(job), encoding="utf-8")
    return [sys.executable, "-m", "samestep", "train", str(file)]


WAYS: dict[str, Command] = {"torchrun --standalone": torchrun, "samestep train": samestep}


def steps_of_rank_1(folder: Path) -> list[tuple[float, int]]:
    """The time of each step of rank 1, and the process that took it."""
    return sorted((at, who.pid) for who, times in noted(folder).items() if who.rank == 1 for at in times)


def kill(folder: Path, killed: list[float], limit: float, started: subprocess.Popen[bytes]) -> None:
    """Kill rank 1 after its first steps, and wait until another process takes a step."""
    until = time.monotonic() + limit
    victim = None
    while time.monotonic() < until and started.poll() is None:
        steps = steps_of_rank_1(folder)
        if victim is None and len(steps) >= KILLED_AFTER:
            victim = steps[-1][1]
            killed.append(time.time())
            os.kill(victim, signal.SIGKILL)
        elif victim is not None and steps[-1][1] != victim:
            killed.append(next(at for at, pid in steps if pid != victim))
            return
        time.sleep(0.005)


def take(way: Command, limit: float) -> Run:
    with TemporaryDirectory(prefix="samestep-recovery-") as place:
        folder = Path(place)
        times: list[float] = []
        outcome = subprocess_group.run(way(folder), limit=limit, meanwhile=partial(kill, folder, times, limit))
        told = folder / "run" / "faults.jsonl"
        if told.is_file():
            restarts = len(told.read_text(encoding="utf-8").splitlines())
        else:
            restarts = max(0, len(list(folder.glob("start-*"))) - 1)
        return Run(
            recovered=outcome.code == 0 and len(times) == 2,
            restarts=restarts,
            seconds=times[1] - times[0] if len(times) == 2 else None,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=8, help="of each way (default: 8)")
    parser.add_argument("--time-limit", type=float, default=60, metavar="S", help="of one run (default: 60 s)")
    parser.add_argument("--ways", nargs="*", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--docs", action="store_true", help="write the table into the docs")
    options = parser.parse_args()
    found: dict[str, list[Run]] = {name: [] for name in options.ways}
    for _ in range(options.runs):
        for name in options.ways:  # in turns, so that other load on the machine affects both
            found[name].append(take(WAYS[name], options.time_limit))
            print(f"{name}: {found[name][-1]}", file=sys.stderr)
    table = Table(title=f"rank 1 of 2 killed after {KILLED_AFTER} steps")
    for title in ("", "recovered", "wasted restarts", "s to the next step, median", "min - max"):
        table.add_column(title, justify="left" if not title else "right")
    rows = [summary(name, runs) for name, runs in found.items()]
    for row in rows:
        middle, *ends = [f"{each:.2f}" for each in row["seconds"]] or [""]
        table.add_row(
            row["way"], f"{row['recovered']} of {row['runs']}", str(row["wasted"]), middle, " - ".join(ends)
        )
    Console(width=110).print(table)
    if options.json is not None:
        values = {name: [vars(run) for run in runs] for name, runs in found.items()}
        options.json.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    if options.docs:
        TABLE.keep(rows)


def summary(name: str, runs: Sequence[Run]) -> dict[str, Any]:
    """What a way did in all runs; of the seconds the median, the least and the most, none if no run recovered."""
    seconds = [run.seconds for run in runs if run.recovered and run.seconds is not None]
    return {
        "way": name,
        "runs": len(runs),
        "recovered": sum(run.recovered for run in runs),
        "wasted": sum(max(0, run.restarts - 1) for run in runs),
        "seconds": [median(seconds), min(seconds), max(seconds)] if seconds else [],
    }


def markdown(rows: Sequence[Mapping[str, Any]], language: str) -> str:
    lines = [
        [
            f"`{row['way']}`",
            RECOVERED[language].format(**row),
            str(row["wasted"]),
            "{:.2f}, {:.2f} - {:.2f}".format(*row["seconds"]) if row["seconds"] else "",
        ]
        for row in rows
    ]
    return markdown_table(TITLES[language], lines, align="l")


RECOVERED = {"en": "{recovered} of {runs}", "zh": "{runs} 次中 {recovered} 次"}
TITLES: Mapping[str, Sequence[str]] = {
    "en": ("", "recovered", "wasted restarts", "seconds from the kill to the next step: median, minimum - maximum"),
    "zh": ("", "恢复", "浪费的重启", "从被杀到下一步的秒数：中位数，最小 - 最大"),
}
TABLE = MeasuredTable(name="recovery", part="benchmarks/recovery.py", page="docs/faults.md", text=markdown)


if __name__ == "__main__":
    main()
