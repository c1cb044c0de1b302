"""What samestep's step costs beside a hand-written PyTorch loop: the same job, side by side, in alternating pairs.

    python benchmarks/overhead.py [--pairs 5] [--steps 40] [--json FILE]

Each run is a process (or two) of its own. Of each run the median step is taken, after the first five; of each pair
the ratio; of all pairs the median ratio. Both wait for data, log every step, and compute the same batches.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
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
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    rows = []
    with TemporaryDirectory() as folder, Progress(console=Console(stderr=True)) as progress:
        job = shortened(options.job, options.steps, Path(folder))
        bar = progress.add_task("runs", total=2 * len(options.processes) * options.pairs)
        for processes in options.processes:
            pairs = []
            for number in range(options.pairs):
                # Whoever runs second may find a warmer or a hotter machine: they take turns.
                runners = [handwritten, samestep] if number % 2 == 0 else [samestep, handwritten]
                seconds = {}
                for runner in runners:
                    seconds[runner] = runner(job, processes, options.steps, Path(folder))
                    progress.advance(bar)
                pairs.append((seconds[handwritten], seconds[samestep]))
            rows.append(summary(processes, pairs))
    print_table(rows, options)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


def shortened(job: Path, steps: int, folder: Path) -> Path:
    """The job with so many steps, and few held-out samples: evaluation is not what is timed."""
    values = yaml.safe_load(job.read_text(encoding="utf-8"))
    recipe = values["recipe"]
    recipe.pop("epochs", None)
    recipe["steps"] = steps
    recipe.setdefault("data", {})["held_out"] = 0.005
    file = folder / "job.yaml"
    file.write_text(yaml.safe_dump({"recipe": recipe}), encoding="utf-8")
    return file


def handwritten(job: Path, processes: int, steps: int, folder: Path) -> float:
    log = folder / "handwritten.jsonl"
    script = [str(HERE / "handwritten" / "text_classification.py"), str(job), "--steps", str(steps)]
    script += ["--threads", str(threads(processes)), "--output", str(log)]
    alone = [sys.executable]
    together = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    run((alone if processes == 1 else together) + script)
    return median_step(log, lambda line: line["seconds"])


def samestep(job: Path, processes: int, steps: int, folder: Path) -> float:
    runs = folder / "samestep"
    command = [sys.executable, "-m", "samestep", "train", str(job), "--folder", str(runs)]
    run([*command, "--layout", f"dp{processes}", "--threads", str(threads(processes))])
    return median_step(runs / "metrics.jsonl", lambda line: line["step_seconds"] + line["data_seconds"])


def threads(processes: int) -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // processes)


def run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")


def median_step(log: Path, seconds_of: Callable[[dict[str, float]], float]) -> float:
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    return statistics.median(seconds_of(line) for line in lines[SETTLE:])


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
