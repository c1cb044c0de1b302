"""Measures the cost of saving: asynchronous, synchronous, torch.save on rank 0, and none, in turns in one training.

    python benchmarks/checkpoints.py [--layout dp2] [--every 20] [--rounds 7] [--json FILE]

The training is divided into blocks of `--every` steps. Before each block the state (model and optimizer) is saved in
one of the four ways, in turns; a block's time is that of its steps and of all waiting for the save. The result of a
way is its median block, and the ratio to the median block without saving. All ways sync their files to disk before
they count as saved; samestep also computes checksums and renames the folder.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from samestep.checkpoint.save import Saver
from samestep.comm.mesh import new_group
from samestep.engines.native.trainer import NativeTrainer
from samestep.job import Job
from samestep.jobfile import load
from samestep.launch import local
from samestep.launch.world import join
from samestep.layout import Layout
from samestep.tasks.registry import resolve
from samestep.training.fit import Training
from samestep.training.state import save_state

HERE = Path(__file__).parent
SETTLE = 5  # steps until memory is allocated and caches are warm
Save = Callable[[int], None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", type=Path, default=HERE.parent / "examples" / "reviews.yaml")
    parser.add_argument("--layout", default="dp2")
    parser.add_argument("--every", type=int, default=20, help="steps of a block")
    parser.add_argument("--rounds", type=int, default=7, help="blocks of each way")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    job, layout = load(options.job).job, Layout.parse(options.layout)
    job = replace(job, run=replace(job.run, threads=1))
    with TemporaryDirectory(prefix="samestep-") as folder:
        found = local.start(rank, (job, layout, options.every, options.rounds, folder), layout.size)
    rows = summary(found)
    print_table(rows, options)
    if options.json is not None:
        options.json.write_text(
            json.dumps({"blocks_seconds": found, "rows": rows}, indent=2) + "\n", encoding="utf-8"
        )


def rank(job: Job, layout: Layout, every: int, rounds: int, folder: str) -> dict[str, Any]:
    """Train on this rank; returns rank 0's seconds of each block, by way."""
    with join(threads=1) as world:
        training = Training(job, resolve(job.recipe), world, layout)
        savers: list[Saver] = []
        ways = ways_of(training, layout, Path(folder), savers)
        steps = training.steps()
        take(steps, SETTLE)
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        done = SETTLE
        for number in range(rounds + 1):
            names = list(ways)
            for name in names[number % len(names) :] + names[: number % len(names)]:
                dist.barrier()
                began = time.perf_counter()
                ways[name](done)
                take(steps, every)
                for saver in savers:  # finish pending writes, so that they don't slow the next block
                    saver.wait()
                dist.barrier()
                if number:  # the first round allocates memory and creates files, and does not count
                    seconds[name].append(time.perf_counter() - began)
                done += every
        numbers = sum(parameter.numel() for _, parameter in training.session.trainer.parameters())
        return {"parameters": numbers, "every": every, "layout": str(layout), "seconds": seconds}


def ways_of(training: Training, layout: Layout, folder: Path, savers: list[Saver]) -> dict[str, Save]:
    trainer = training.session.trainer
    assert isinstance(trainer, NativeTrainer)
    world = training.session.world

    def by_samestep(*, asynchronous: bool) -> Save:
        place = folder / ("asynchronous" if asynchronous else "synchronous")
        group = new_group(range(world.world_size), backend="gloo")
        saver = Saver(place, group, asynchronous=asynchronous)
        saver.prepare()
        savers.append(saver)
        return lambda step: save_state(trainer, saver, world, layout, engine="native", step=step)

    def by_torch(step: int) -> None:
        if world.rank == 0:
            with (folder / "plain.pt").open("wb") as stream:
                state = {"model": trainer.model.state_dict(), "optimizer": trainer.optimizer.state_dict()}
                torch.save({**state, "step": step}, stream)
                stream.flush()
                os.fsync(stream.fileno())
        dist.barrier()

    ways: dict[str, Save] = {
        "none": lambda _: None,
        "asynchronous": by_samestep(asynchronous=True),
        "synchronous": by_samestep(asynchronous=False),
    }
    if layout.replicate == layout.size:  # under other layouts rank 0 does not have the whole state
        ways["torch.save on rank 0"] = by_torch
    return ways


def take(steps: Iterator[Any], count: int) -> None:
    for _ in range(count):
        next(steps)


def summary(found: dict[str, Any]) -> list[dict[str, Any]]:
    none = statistics.median(found["seconds"]["none"])
    return [
        {
            "saving": name,
            "block_seconds": statistics.median(blocks),
            "share_of_step_time": statistics.median(blocks) / none - 1,
            "lowest": min(blocks) / none - 1,
            "highest": max(blocks) / none - 1,
        }
        for name, blocks in found["seconds"].items()
    ]


def print_table(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    table = Table(title=f"{options.layout}: saved every {options.every} steps, median of {options.rounds} blocks")
    for title in ("saving", "seconds a block", "more than none", "from", "to"):
        table.add_column(title, justify="left" if title == "saving" else "right")
    for row in rows:
        shares = [f"{row[name]:+.1%}" for name in ("share_of_step_time", "lowest", "highest")]
        table.add_row(row["saving"], f"{row['block_seconds']:.3f}", *shares)
    Console().print(table)


if __name__ == "__main__":
    main()
