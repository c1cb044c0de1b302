"""What samestep's step costs beside a hand-written PyTorch loop: the same job, side by side, step by step in turns.

    python benchmarks/overhead.py [--pairs 5] [--steps 60] [--json FILE]

A pair is one start of one process (or two), in which the hand-written loop and samestep train a model each and take
their steps in turns: whatever slows the machine for a second slows both. Of each pair the median step of either is
taken, after the first five, and their ratio; of all pairs the median ratio. Both wait for data, log every step, and
compute the same batches.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

HERE = Path(__file__).parent
SETTLE = 5  # steps until memory is allocated and caches are warm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", type=Path, default=HERE.parent / "examples" / "reviews.yaml")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)  # the folder of the pair that this rank runs
    options = parser.parse_args()
    if options.rank_of is not None:
        take_turns(options.rank_of, options.steps)
        return

    rows = []
    with TemporaryDirectory() as folder, Progress(console=Console(stderr=True)) as progress:
        shorten(options.job, options.steps, Path(folder))
        bar = progress.add_task("pairs", total=len(options.processes) * options.pairs)
        for processes in options.processes:
            pairs = []
            for _ in range(options.pairs):
                pairs.append(pair(processes, options.steps, Path(folder)))
                progress.advance(bar)
            rows.append(summary(processes, pairs))
    print_table(rows, options)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


def shorten(job: Path, steps: int, folder: Path) -> None:
    """Write the job with so many steps, and few held-out samples: evaluation is not what is timed."""
    values = yaml.safe_load(job.read_text(encoding="utf-8"))
    recipe = values["recipe"]
    recipe.pop("epochs", None)
    recipe["steps"] = steps
    recipe.setdefault("data", {})["held_out"] = 0.005
    (folder / "job.yaml").write_text(yaml.safe_dump({"recipe": recipe}), encoding="utf-8")


def pair(processes: int, steps: int, folder: Path) -> tuple[float, float]:
    """The median step of the hand-written loop and of samestep, in seconds, in one start of so many processes."""
    start = [sys.executable]
    if processes > 1:
        start += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command = [*start, str(HERE / "overhead.py"), "--rank-of", str(folder), "--steps", str(steps)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    seconds = json.loads((folder / "seconds.json").read_text(encoding="utf-8"))
    return statistics.median(seconds["handwritten"][SETTLE:]), statistics.median(seconds["samestep"][SETTLE:])


def take_turns(folder: Path, steps: int) -> None:
    """One rank of a pair: both train, and take their steps in turns."""
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
        runners = {
            "handwritten": handwritten(loop, folder if world.rank == 0 else None),
            "samestep": samestep(training, folder if world.rank == 0 else None),
        }
        seconds: dict[str, list[float]] = {name: [] for name in runners}
        for step in range(steps):
            # Whoever comes second may find warmer caches: they take turns in that too.
            for name in sorted(runners, reverse=step % 2 == 1):
                began = time.perf_counter()
                next(runners[name])
                seconds[name].append(time.perf_counter() - began)
        if world.rank == 0:
            (folder / "seconds.json").write_text(json.dumps(seconds), encoding="utf-8")


def handwritten(loop: Any, folder: Path | None) -> Iterator[None]:
    """What an expert's own loop does in a step, with one line in a file for each."""
    with (folder / "handwritten.jsonl" if folder else Path(os.devnull)).open("w", buffering=1) as log:
        for step, report in enumerate(loop.steps()):
            values = {"step": step, "loss": report.loss.item(), "grad_norm": report.grad_norm.item()}
            log.write(json.dumps(values) + "\n")
            yield


def samestep(training: Any, folder: Path | None) -> Iterator[None]:
    """What `samestep train` does in a step, with its records."""
    from samestep.fault_tolerance.nonfinite import NonFinite
    from samestep.training.loop import Readout, StepLog
    from samestep.training.metrics_log import Bar, Records, Tally

    with Records(folder, tensorboard=True) as records, Bar("", training.total_steps, shown=False) as bar:
        guard = NonFinite(
            "stop", folder or Path(), samples_of=training.samples_of, writes=False, norms_may_overflow=False
        )
        log = StepLog(records, bar, Tally(len(training.samples)), guard)
        before = None
        for batch, report in training.steps():
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
        "ratios": ratios,
    }


def print_table(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    table = Table(title=f"a step of {options.job.name}, medians of {options.pairs} pairs of {options.steps} steps")
    for name in ("processes", "handwritten, ms", "samestep, ms", "ratio", "smallest and largest ratio"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            str(row["processes"]),
            f"{row['handwritten_ms']:.1f}",
            f"{row['samestep_ms']:.1f}",
            f"{row['ratio']:.3f}",
            f"{min(row['ratios']):.3f} - {max(row['ratios']):.3f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
