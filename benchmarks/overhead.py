"""Measures samestep's overhead over a hand-written PyTorch loop: the same job, blocks of steps in turns.

    python benchmarks/overhead.py [--pairs 5] [--steps 60] [--dropout 0 0.1] [--json FILE] [--docs]

A pair is one start of one process (or two), in which the hand-written loop and samestep train a model each and
take blocks of steps in turns, so that other load on the machine slows both. A pair gives the ratio of their median
steps, without the first steps of the run and the first step of each block; the result is the median ratio over all
pairs. Both wait for data, log every step, and compute the same batches. `--docs` writes the table of
docs/what-works.md.

samestep's blocks are supervised as `samestep train` supervises its ranks: each rank publishes its status in every
step and its heartbeat from a thread, and a watchdog in another process reads them. During the hand-written loop's
blocks the threads have ended and the watchdog is stopped, so their cost is counted on samestep's side only.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

import yaml
from page_parts import MeasuredTable, markdown_table
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

HERE = Path(__file__).parent
SETTLE = 5  # steps until memory is allocated and caches are warm
BLOCK = 15  # steps of one loop before the other's turn: about two heartbeats of the reviews' job


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", type=Path, default=HERE.parent / "examples" / "reviews.yaml")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--dropout", type=float, nargs="+", default=[0.0, 0.1], help="of the job's model")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--docs", action="store_true", help="write the table into the docs")
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)  # the folder of the pair that this rank runs
    options = parser.parse_args()
    if options.rank_of is not None:
        take_turns(options.rank_of, options.steps)
        return

    rows = []
    settings = [(processes, dropout) for dropout in options.dropout for processes in options.processes]
    with TemporaryDirectory() as folder, Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("pairs", total=len(settings) * options.pairs)
        for processes, dropout in settings:
            shorten(options.job, options.steps, Path(folder), dropout)
            pairs = []
            for _ in range(options.pairs):
                pairs.append(pair(processes, options.steps, Path(folder)))
                progress.advance(bar)
            rows.append({"dropout": dropout} | summary(processes, pairs))
    print_table(rows, options)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    if options.docs:
        TABLE.keep(rows)


def shorten(job: Path, steps: int, folder: Path, dropout: float | None = None) -> None:
    """Write the job with `steps` steps and few held-out samples, since evaluation is not timed."""
    values = yaml.safe_load(job.read_text(encoding="utf-8"))
    recipe = values["recipe"]
    recipe.pop("epochs", None)
    recipe["steps"] = steps
    recipe.setdefault("data", {})["held_out"] = 0.005
    if dropout is not None and "dropout" in recipe.get("model", {}):
        recipe["model"]["dropout"] = dropout
    (folder / "job.yaml").write_text(yaml.safe_dump({"recipe": recipe}), encoding="utf-8")


def pair(processes: int, steps: int, folder: Path) -> tuple[float, float]:
    """Seconds of the median step of the hand-written loop and of samestep, in one start of `processes` processes."""
    start = [sys.executable]
    if processes > 1:
        start += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command = [*start, str(HERE / "overhead.py"), "--rank-of", str(folder), "--steps", str(steps)]
    with watchdog(folder, processes):
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    seconds = json.loads((folder / "seconds.json").read_text(encoding="utf-8"))
    return statistics.median(seconds["handwritten"]), statistics.median(seconds["samestep"])


def _watch(folder: Path, processes: int) -> None:
    from samestep.fault_tolerance.watchdog import Watchdog

    with Watchdog(folder / "round", range(processes), limit=None, goes_on=lambda _: None):
        threading.Event().wait()


@contextmanager
def watchdog(folder: Path, processes: int) -> Iterator[None]:
    """Context with a process whose watchdog reads the ranks' status; rank 0 stops and continues it by its id."""
    shutil.rmtree(folder / "round", ignore_errors=True)  # the previous pair's ranks are recorded there as ended
    (folder / "round").mkdir()
    process = multiprocessing.get_context("spawn").Process(target=_watch, args=(folder, processes), daemon=True)
    process.start()
    (folder / "watchdog").write_text(str(process.pid), encoding="ascii")
    try:
        yield
    finally:
        process.kill()
        process.join()


@contextmanager
def watched(folder: Path, rank: int, supervision: Any) -> Iterator[None]:
    """Context in which a rank is supervised and the pair's watchdog runs; outside it, the watchdog is stopped."""
    pid = int((folder / "watchdog").read_text(encoding="ascii")) if rank == 0 else None
    if pid is not None:
        os.kill(pid, signal.SIGCONT)
    with supervision:
        yield
    if pid is not None:
        os.kill(pid, signal.SIGSTOP)


def take_turns(folder: Path, steps: int) -> None:
    """One rank of a pair: runs both trainings, blocks of steps in turns."""
    from samestep.fault_tolerance.rank import RankSupervision, Round
    from samestep.handwritten.loop import Loop
    from samestep.jobfile import load
    from samestep.launch.world import join
    from samestep.layout import Layout
    from samestep.tasks.registry import resolve
    from samestep.training.fit import Training

    job = load(folder / "job.yaml").job
    task = resolve(job.recipe)
    with join() as world:
        training = Training(job, task, world, Layout(replicate=world.world_size))
        loop = Loop(job.recipe, task, rank=world.rank, world_size=world.world_size, device=world.device)
        supervision = RankSupervision(job.run, Round(folder=folder / "round"))
        records = folder if world.rank == 0 else None
        runners = {
            "handwritten": handwritten(loop, records),
            "samestep": samestep(training, records, supervision),
        }
        seconds: dict[str, list[float]] = {name: [] for name in runners}
        for number, begin in enumerate(range(0, steps, BLOCK)):
            # The second one may find warmer caches, so the order alternates.
            for name in sorted(runners, reverse=number % 2 == 1):
                with watched(folder, world.rank, supervision) if name == "samestep" else nullcontext():
                    for step in range(begin, min(begin + BLOCK, steps)):
                        began = time.perf_counter()
                        next(runners[name])
                        # In the first step of a block the caches still hold the other loop's data.
                        if step >= SETTLE and step > begin:
                            seconds[name].append(time.perf_counter() - began)
        if world.rank == 0:
            (folder / "seconds.json").write_text(json.dumps(seconds), encoding="utf-8")


def handwritten(loop: Any, folder: Path | None) -> Iterator[None]:
    """The steps of a hand-written loop, with one line in a file for each."""
    with (folder / "handwritten.jsonl" if folder else Path(os.devnull)).open("w", buffering=1) as log:
        for step, report in enumerate(loop.steps()):
            values = {"step": step, "loss": report.loss.item(), "grad_norm": report.grad_norm.item()}
            log.write(json.dumps(values) + "\n")
            yield


def samestep(training: Any, folder: Path | None, supervision: Any = None) -> Iterator[None]:
    """The steps of `samestep train`, with its records, and with the rank's supervision if it is given."""
    from samestep.fault_tolerance.nonfinite import NonFinite
    from samestep.progress.bars import Bar
    from samestep.training.loop import Readout, StepLog
    from samestep.training.metrics_log import Records, Tally

    with Records(folder, log=None) as records, Bar("", training.total_steps, shown=False) as bar:
        guard = NonFinite(
            "stop", folder or Path(), samples_of=training.samples_of, writes=False, norms_may_overflow=False
        )
        log = StepLog(records, bar, Tally(len(training.samples)), guard)
        before = None
        for batch, report in training.steps(supervision=supervision):
            reading = Readout(report)
            if before is not None:
                log.add(*before)
            before = (batch, reading, 0.0)
            yield


def summary(processes: int, pairs: list[tuple[float, float]]) -> dict[str, Any]:
    ratios = [ours / theirs for theirs, ours in pairs]
    return {
        "processes": processes,
        "pairs": len(pairs),
        "handwritten_ms": 1e3 * statistics.median(theirs for theirs, _ in pairs),
        "samestep_ms": 1e3 * statistics.median(ours for _, ours in pairs),
        "ratio": statistics.median(ratios),
        "least": min(ratios),
        "most": max(ratios),
        "ratios": ratios,
    }


def print_table(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    table = Table(title=f"a step of {options.job.name}, medians of {options.pairs} pairs of {options.steps} steps")
    for name in ("processes", "dropout", "handwritten, ms", "samestep, ms", "ratio", "smallest and largest ratio"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            str(row["processes"]),
            f"{row['dropout']:g}",
            f"{row['handwritten_ms']:.1f}",
            f"{row['samestep_ms']:.1f}",
            f"{row['ratio']:.3f}",
            f"{row['least']:.3f} - {row['most']:.3f}",
        )
    Console().print(table)


def markdown(rows: Sequence[Mapping[str, Any]], language: str) -> str:
    lines = [
        [
            str(row["processes"]),
            f"{row['dropout']:g}",
            str(row["pairs"]),
            f"{row['handwritten_ms']:.1f}",
            f"{row['samestep_ms']:.1f}",
            RATIO[language].format(**row),
        ]
        for row in rows
    ]
    return markdown_table(TITLES[language], lines, align="l")


RATIO = {"en": "{ratio:.3f} ({least:.3f} to {most:.3f})", "zh": "{ratio:.3f}（{least:.3f} 到 {most:.3f}）"}
TITLES: Mapping[str, Sequence[str]] = {
    "en": (
        "processes",
        "dropout",
        "starts",
        "hand-written, ms a step",
        "samestep, ms a step",
        "ratio (smallest to largest)",
    ),
    "zh": ("进程数", "dropout", "启动次数", "手写，毫秒/步", "samestep，毫秒/步", "比值（最小到最大）"),
}
TABLE = MeasuredTable(name="overhead", part="benchmarks/overhead.py", page="docs/what-works.md", text=markdown)


if __name__ == "__main__":
    main()
