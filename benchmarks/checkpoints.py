"""Measures the cost of saving: asynchronous, synchronous, torch.save on rank 0, and none, in turns in one training.

    python benchmarks/checkpoints.py [--layouts dp2 fsdp2] [--every 20] [--rounds 7] [--json FILE] [--docs]

The training is divided into blocks of `--every` steps. Before each block the state (model and optimizer) is saved in
one of the four ways, in turns; a block's time is that of its steps and of all waiting for the save. The result of a
way is its median block, and the ratio to the median block without saving. `--docs` writes the table of
docs/checkpoints.md and docs/zh/checkpoints.md, with a column a layout. All ways sync their files to disk before
they count as saved; samestep also computes checksums and renames the folder.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

from page_parts import MeasuredTable, markdown_table

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
    parser.add_argument("--layouts", nargs="+", default=["dp2"])
    parser.add_argument("--every", type=int, default=20, help="steps of a block")
    parser.add_argument("--rounds", type=int, default=7, help="blocks of each way")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--docs", action="store_true", help="write the table into the docs")
    options = parser.parse_args()
    job = load(options.job).job
    job = replace(job, run=replace(job.run, threads=1))
    found = []
    for layout in map(Layout.parse, options.layouts):
        with TemporaryDirectory(prefix="samestep-") as folder:
            blocks = local.start(rank, (job, layout, options.every, options.rounds, folder), layout.size)
        found.append({"layout": str(layout), "blocks_seconds": blocks, "rows": summary(blocks)})
        print_table(found[-1]["rows"], str(layout), options)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    if options.docs:
        TABLE.keep([{"layout": each["layout"], "rows": each["rows"]} for each in found])


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


def print_table(rows: list[dict[str, Any]], layout: str, options: argparse.Namespace) -> None:
    table = Table(title=f"{layout}: saved every {options.every} steps, median of {options.rounds} blocks")
    for title in ("saving", "seconds a block", "more than none", "from", "to"):
        table.add_column(title, justify="left" if title == "saving" else "right")
    for row in rows:
        shares = [f"{row[name]:+.1%}" for name in ("share_of_step_time", "lowest", "highest")]
        table.add_row(row["saving"], f"{row['block_seconds']:.3f}", *shares)
    Console().print(table)


def markdown(found: Sequence[Mapping[str, Any]], language: str) -> str:
    """A row for each way to save, a column for each layout: how much longer a block took than without saving."""
    words = WORDS[language]
    columns = {each["layout"]: {row["saving"]: row for row in each["rows"]} for each in found}
    lines = []
    for way in dict.fromkeys(way for column in columns.values() for way in column if way != "none"):
        cells = []
        for column in columns.values():
            shares = [100 * column[way][name] for name in SHARES] if way in column else None
            cells.append(words["cell"].format(*shares) if shares else "")
        lines.append([words.get(way, way), *cells])
    titles = [words["single"] if layout == "single" else f"`{layout}`" for layout in columns]
    return markdown_table([words["saving"], *titles], lines, align="l")


SHARES = ("share_of_step_time", "lowest", "highest")
WORDS: Mapping[str, Mapping[str, str]] = {
    "en": {
        "saving": "saving",
        "single": "one process, one core free",
        "torch.save on rank 0": "`torch.save` on rank 0",
        "cell": "{:+.1f} % ({:+.1f} to {:+.1f})",
    },
    "zh": {
        "saving": "保存方式",
        "single": "单进程，空出一个核",
        "asynchronous": "异步",
        "synchronous": "同步",
        "torch.save on rank 0": "rank 0 上 `torch.save`",
        "cell": "{:+.1f} %（{:+.1f} 至 {:+.1f}）",
    },
}
TABLE = MeasuredTable(name="checkpoints", part="benchmarks/checkpoints.py", page="docs/checkpoints.md", text=markdown)


if __name__ == "__main__":
    main()
