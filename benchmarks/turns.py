"""Steps of hand-written PyTorch, Lightning Fabric and samestep in the same ranks, in turns, beside their limit.

    pip install --no-deps lightning -c constraints.txt                     # for the way "fabric"
    python benchmarks/turns.py examples/language.yaml --processes 2 --starts 5 --json turns.json

Whatever slows the machine for a second slows all ways alike, and all have the heap that samestep's ranks have.
"alone" is the hand-written loop on as many samples a rank without any communication: what that computation costs at
least. All others take the step of the global batch; the hand-written loops and Fabric send over gloo, samestep as it
would by itself. A way's ratio is the median over starts of its median step by that of hand-written DDP.

With `--heap`, what that heap is worth: each way starts by itself, in turns with it and with the heap as it comes.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.overhead import handwritten, samestep, shorten
from samestep.handwritten.loop import Loop
from samestep.job import Job, Run
from samestep.jobfile import load
from samestep.launch.world import World, join
from samestep.layout import Layout
from samestep.tasks.base import Batch, Task, call
from samestep.tasks.registry import resolve
from samestep.training.fit import Training

SETTLE = 5  # steps until memory is allocated and caches are warm


@dataclass(frozen=True, kw_only=True)
class Place:
    """What a way has on its rank."""

    job: Job
    task: Task
    world: World
    gloo: dist.ProcessGroup
    folder: Path | None  # for its records, on rank 0


Steps = Callable[[Place], Iterator[None]]


def _loop(place: Place, **settings: Any) -> Loop:
    return Loop(
        place.job.recipe, place.task, rank=place.world.rank, world_size=place.world.world_size,
        device=place.world.device, group=place.gloo, **settings,
    )  # fmt: skip


def no_messages(place: Place) -> Iterator[None]:
    """A rank's samples of every step, and an update by their gradient alone."""
    recipe, world = place.job.recipe, place.world
    alone = replace(recipe, batch=max(1, recipe.batch // world.world_size))
    return handwritten(Loop(alone, place.task, device=world.device), place.folder)


def ddp(place: Place) -> Iterator[None]:
    return handwritten(_loop(place), place.folder)


def ddp_compiled(place: Place) -> Iterator[None]:
    return handwritten(_loop(place, compile=True), place.folder)


def fabric(place: Place) -> Iterator[None]:
    """The loop that Fabric's users write, with its records."""
    from lightning.fabric import Fabric  # pyright: ignore[reportMissingImports]
    from lightning.fabric.strategies import DDPStrategy  # pyright: ignore[reportMissingImports]

    loop = _loop(place)
    world = place.world
    strategy = DDPStrategy(process_group=place.gloo, gradient_as_bucket_view=True)
    precision = "bf16-mixed" if place.job.recipe.precision == "bf16" else "32-true"
    runner = Fabric(accelerator="cpu", devices=world.world_size, strategy=strategy, precision=precision)
    runner.launch()
    model, optimizer = runner.setup(loop.model, loop.optimizer)
    with (place.folder / "fabric.jsonl" if place.folder else Path(os.devnull)).open("w", buffering=1) as log:
        for step, (parts, _) in enumerate(loop.batches()):
            totals = torch.zeros(2, dtype=torch.float64)
            (batch, _), samples = parts[0], len(loop.order.global_batch(step))
            with runner.autocast():
                loss, terms = place.task.loss(call(model, batch.inputs), Batch(*batch))
            totals += torch.tensor([loss.detach(), terms])
            sending = dist.all_reduce(totals, group=place.gloo, async_op=True)
            optimizer.zero_grad()
            runner.backward(loss * world.world_size / samples)
            assert sending is not None
            sending.wait()
            norm: Any = runner.clip_gradients(model, optimizer, max_norm=place.job.recipe.clip or float("inf"))
            optimizer.step()
            loop.schedule.step()
            log.write(json.dumps({"step": step, "loss": (totals[0] / totals[1]).item(), "norm": float(norm)}) + "\n")
            yield


def native(**run: Any) -> Steps:
    """samestep with these keys of a job's `run:` section."""

    def steps(place: Place) -> Iterator[None]:
        layout = Layout(replicate=place.world.world_size)
        job = replace(place.job, run=Run(layout=str(layout), **run))
        return samestep(Training(job, place.task, place.world, layout), place.folder)

    return steps


WAYS: Mapping[str, tuple[str, Steps]] = {
    "alone": ("hand-written, no messages", no_messages),
    "ddp": ("hand-written DDP", ddp),
    "ddp-compiled": ("hand-written DDP, torch.compile", ddp_compiled),
    "fabric": ("Lightning Fabric", fabric),
    "samestep": ("samestep", native()),
    "shared": ("samestep, share_replicas", native(share_replicas=True)),
    "by-length": ("samestep, share_replicas, group_by_length", native(share_replicas=True, group_by_length=True)),
    "compiled": ("samestep, compile", native(compile=True)),
}
BASE = "ddp"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", type=Path)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--ways", default="alone,ddp,samestep,shared", help=f"of {', '.join(WAYS)}, by commas")
    parser.add_argument("--heap", action="store_true", help="time each way by itself, with its heap and as it comes")
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--rank-of", type=Path, help=argparse.SUPPRESS
    )  # the folder of the start that this rank is of
    options = parser.parse_args()
    ways = [way.strip() for way in options.ways.split(",")]
    if unknown := set(ways) - set(WAYS):
        raise SystemExit(f"no such way: {', '.join(sorted(unknown))}; there are {', '.join(WAYS)}")
    if options.rank_of is not None:
        take_turns(options.rank_of, options.precision, ways)
        return
    starts = []
    with TemporaryDirectory() as folder, Progress(console=Console(stderr=True)) as progress:
        shorten(options.job, options.steps, Path(folder))
        bar = progress.add_task("starts", total=options.starts)
        for _ in range(options.starts):
            starts.append(heap(options, ways, Path(folder)) if options.heap else start(options, ways, Path(folder)))
            progress.advance(bar)
    rows = [summary(way, f"{way}, system" if options.heap else BASE, starts) for way in ways]
    print_table(rows, options)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


def start(options: argparse.Namespace, ways: Sequence[str], folder: Path, **variables: str) -> Mapping[str, float]:
    """The median step of every way in one start of all ranks, in seconds: of the slowest rank.

    `variables` are added to the environment; ranks that find the allocator set up there leave it as it is.
    """
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.processes}"]
    mine = [str(Path(__file__)), str(options.job), "--precision", options.precision, "--rank-of", str(folder)]
    command = [sys.executable, *launcher, *mine, "--ways", ",".join(ways)]
    given = {**os.environ, **variables}
    done = subprocess.run(command, env=given, capture_output=True, text=True, timeout=1800, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    return json.loads((folder / "seconds.json").read_text(encoding="utf-8"))


def heap(options: argparse.Namespace, ways: Sequence[str], folder: Path) -> Mapping[str, float]:
    """The median step of every way alone, with the heap that ranks have and, as "way, system", as it comes."""
    found: dict[str, float] = {}
    for way in ways:
        found[way] = start(options, [way], folder)[way]
        found[f"{way}, system"] = start(options, [way], folder, GLIBC_TUNABLES="glibc.malloc.tcache_count=7")[way]
    return found


def take_turns(folder: Path, precision: str, ways: Sequence[str]) -> None:
    """One rank: every way trains, and they take their steps in turns, each time beginning with another one."""
    job = load(folder / "job.yaml").job
    job = replace(job, recipe=replace(job.recipe, precision=precision))
    task = resolve(job.recipe)
    with join(transport="auto") as world:
        gloo: Any = dist.new_group(backend="gloo")
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        runners = {}
        for number, way in enumerate(ways):
            mine = folder / str(number) if world.rank == 0 else None
            if mine is not None:
                mine.mkdir(exist_ok=True)
            runners[way] = WAYS[way][1](Place(job=job, task=task, world=world, gloo=gloo, folder=mine))
        for step in range(job.recipe.steps or 0):
            turn = step % len(ways)
            for way in [*ways[turn:], *ways[:turn]]:
                dist.barrier(gloo)  # all ranks begin each way's step together
                began = time.perf_counter()
                next(runners[way])
                seconds[way].append(time.perf_counter() - began)
        medians = {way: statistics.median(each[SETTLE:]) for way, each in seconds.items()}
        everyone: list[Any] = [None] * world.world_size
        dist.all_gather_object(everyone, medians, group=gloo)
        if world.rank == 0:
            slowest = {way: max(each[way] for each in everyone) for way in ways}
            (folder / "seconds.json").write_text(json.dumps(slowest), encoding="utf-8")


def summary(way: str, base: str, starts: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    ratios = [each[way] / each[base] for each in starts]
    return {
        "way": way,
        "starts": len(starts),
        "seconds_median": statistics.median(each[way] for each in starts),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
    }


def print_table(rows: Sequence[Mapping[str, Any]], options: argparse.Namespace) -> None:
    what = f"{options.job.name}, {options.precision}, {options.processes} processes"
    table = Table(title=f"a step of {what}: medians of {options.starts} starts of {options.steps} steps")
    table.add_column("way")
    for name in ("ms", "times its own, heap as it comes" if options.heap else "times DDP", "least - most"):
        table.add_column(name, justify="right")
    for row in rows:
        spread = f"{min(row['ratios']):.3f} - {max(row['ratios']):.3f}"
        table.add_row(WAYS[row["way"]][0], f"{1e3 * row['seconds_median']:.1f}", f"{row['ratio']:.3f}", spread)
    Console().print(table)


if __name__ == "__main__":
    main()
