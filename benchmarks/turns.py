"""Times steps of hand-written PyTorch, other libraries and samestep in the same ranks, in turns, beside their limit.

    pip install --no-deps lightning -c constraints.txt                     # for the way "fabric"
    python benchmarks/turns.py examples/language.yaml --processes 2 --starts 5 --json turns.json
    python benchmarks/turns.py examples/reviews.yaml --hosts 2 --rate 1gbit --ways alone,ddp,accelerate,samestep

Other load on the machine slows all ways alike, and all use the memory allocator settings of samestep's ranks. "alone"
is the hand-written loop with as many samples per rank and no communication: the least that the computation costs. All
others take the step of the global batch, which is checked by comparing their last losses. Hand-written loops and
libraries use gloo, samestep the transport that it chooses (ways.py). A way's ratio is the median over starts of its
median step divided by that of hand-written DDP.

With `--hosts`, `--processes` is the number per host; the hosts are made from Linux namespaces (root needed; see
tools/testbed), and their links have the rate `--rate` in each direction. `--heap` measures the effect of the
allocator settings: each way runs by itself, with and without them in turns.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.overhead import shorten
from benchmarks.ways import WAYS, Place
from samestep import environment
from samestep.comm.shared_memory.backend import for_transport
from samestep.jobfile import load
from samestep.launch.world import join
from samestep.tasks.registry import resolve

SETTLE = 5  # steps until memory is allocated and caches are warm
BASE = "ddp"
TIME_LIMIT = 1800.0  # seconds of a start
# The largest difference of a last loss from hand-written DDP's: rounding, which Adam magnifies.
SAME = {"fp32": 1e-3, "bf16": 3e-2}
RECORDS = ("metrics.jsonl", "handwritten.jsonl", "peer.jsonl")  # records of steps; a way writes one of them


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", type=Path)
    parser.add_argument("--processes", type=int, default=2, help="of each host")
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--rate", help="of each host's link, such as 1gbit or 100mbit")
    parser.add_argument("--precision", choices=tuple(SAME), default="fp32")
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--ways", default="alone,ddp,samestep,shared", help=f"of {', '.join(WAYS)}, by commas")
    parser.add_argument("--heap", action="store_true", help="time each way by itself, with its heap and as it comes")
    parser.add_argument("--json", type=Path)
    # The folder of the start to which this rank belongs.
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    ways = [way.strip() for way in options.ways.split(",")]
    if unknown := set(ways) - set(WAYS):
        raise SystemExit(f"no such way: {', '.join(sorted(unknown))}; there are {', '.join(WAYS)}")
    if options.rank_of is not None:
        take_turns(options.rank_of, options.precision, ways)
        return
    if BASE not in ways and not options.heap:
        raise SystemExit(f"--ways: {BASE} is missing, which the others are held against; use {BASE},{options.ways}")
    starts = []
    with TemporaryDirectory() as folder, Progress(console=Console(stderr=True)) as progress:
        shorten(options.job, options.steps, Path(folder))
        bar = progress.add_task("starts", total=options.starts)
        for _ in range(options.starts):
            starts.append(heap(options, ways, Path(folder)) if options.heap else start(options, ways, Path(folder)))
            progress.advance(bar)
    names = ("precision", "processes", "hosts", "rate")
    what = {"job": options.job.stem, **{name: getattr(options, name) for name in names}}
    rows = [what | summary(way, f"{way}, system" if options.heap else BASE, starts) for way in ways]
    print_table(rows, options)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


def start(options: argparse.Namespace, ways: Sequence[str], folder: Path, **variables: str) -> Mapping[str, float]:
    """Seconds of each way's median step in one start of all ranks.

    `variables` are added to the environment; ranks keep allocator settings that they find there.
    """
    mine = [str(Path(__file__).resolve()), str(options.job.resolve()), "--precision", options.precision]
    command = [f"--nproc-per-node={options.processes}", *mine, "--rank-of", str(folder), "--ways", ",".join(ways)]
    if options.hosts > 1:
        on_hosts(options, command, folder, variables)
    else:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *command]
        given = {**os.environ, **variables}
        done = subprocess.run(command, env=given, capture_output=True, text=True, timeout=TIME_LIMIT, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    return json.loads((folder / "seconds.json").read_text(encoding="utf-8"))


def on_hosts(options: argparse.Namespace, command: Sequence[str], folder: Path, variables: Mapping[str, str]) -> None:
    """Start the ranks of every host of a new testbed, and wait until they end; raises if one fails."""
    from testbed import Testbed

    given = {"OMP_NUM_THREADS": "1", **variables}
    with Testbed(options.hosts, ssh=False) as bed:
        bed.limit(options.rate)
        meeting = [f"--nnodes={options.hosts}", f"--master-addr={bed.hosts[0].name}", "--master-port=29500"]
        running = []
        for number, host in enumerate(bed.hosts):
            ranks = [sys.executable, "-m", "torch.distributed.run", *meeting, f"--node-rank={number}", *command]
            running.append(host.start(ranks, env=given, cwd=folder))
        for each in running:
            each.finish(TIME_LIMIT)


def heap(options: argparse.Namespace, ways: Sequence[str], folder: Path) -> Mapping[str, float]:
    """Each way's median step by itself, with the ranks' allocator settings and, as "way, system", without them."""
    found: dict[str, float] = {}
    for way in ways:
        found[way] = start(options, [way], folder)[way]
        found[f"{way}, system"] = start(options, [way], folder, GLIBC_TUNABLES="glibc.malloc.tcache_count=7")[way]
    return found


def take_turns(folder: Path, precision: str, ways: Sequence[str]) -> None:
    """One rank: runs all ways, which take their steps in turns; each round begins with another way."""
    job = load(folder / "job.yaml").job
    job = replace(job, recipe=replace(job.recipe, precision=precision))
    task = resolve(job.recipe)
    ranks = environment.ranks()
    assert ranks is not None  # torchrun started this
    with join(cpu_backend=for_transport("auto")) as world:
        gloo: Any = dist.new_group(backend="gloo")
        moments: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
        runners = {}
        for number, way in enumerate(ways):
            mine = folder / str(number) if world.rank == 0 else None
            if mine is not None:
                mine.mkdir(exist_ok=True)
            place = Place(job=job, task=task, world=world, local_ranks=ranks.local_world_size, folder=mine)
            with default_group(gloo if WAYS[way].over_gloo else dist.group.WORLD):
                runners[way] = WAYS[way].steps(place)
        for step in range(job.recipe.steps or 0):
            turn = step % len(ways)
            for way in [*ways[turn:], *ways[:turn]]:
                with default_group(gloo if WAYS[way].over_gloo else dist.group.WORLD):
                    dist.barrier(gloo)  # all ranks start each way's step together
                    began = time.perf_counter()
                    next(runners[way])
                    moments[way].append((began, time.perf_counter()))
        everyone: list[Any] = [None] * world.world_size
        dist.all_gather_object(everyone, moments, group=gloo)
        if world.rank == 0:
            check_losses(folder, precision, ways)
            medians = {way: median_step([each[way] for each in everyone]) for way in ways}
            (folder / "seconds.json").write_text(json.dumps(medians), encoding="utf-8")


def median_step(of_ranks: Sequence[Sequence[tuple[float, float]]]) -> float:
    """Median seconds of a step, from the first rank's start of it to the last rank's end.

    All ranks run on this machine and read one clock. If there are more ranks than cores, a rank may run only after
    another has finished; by its own times alone, ways without messages would seem to take half as long.
    """
    steps = list(zip(*of_ranks, strict=True))[SETTLE:]
    return statistics.median(max(end for _, end in step) - min(begin for begin, _ in step) for step in steps)


@contextmanager
def default_group(group: Any) -> Iterator[None]:
    """Make a group the default process group, for libraries that accept no other."""
    before = dist.group.WORLD
    dist.distributed_c10d._update_default_pg(group)
    try:
        yield
    finally:
        dist.distributed_c10d._update_default_pg(before)


def check_losses(folder: Path, precision: str, ways: Sequence[str]) -> None:
    """Raise ValueError if a way's last loss differs from hand-written DDP's: it took other steps."""
    losses: dict[str, dict[int, float]] = {}
    for number, way in enumerate(ways):
        (file,) = (file for name in RECORDS if (file := folder / str(number) / name).exists())
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        losses[way] = {line["step"]: line["loss"] for line in lines if "loss" in line}
    for way in set(ways) - {"alone", "alone-compiled", BASE} if BASE in losses else ():
        step = max(losses[way].keys() & losses[BASE])  # samestep writes a step's record during the next one
        loss, theirs = losses[way][step], losses[BASE][step]
        if abs(loss / theirs - 1) > SAME[precision]:
            raise ValueError(f"step {step}: {way} has a loss of {loss}, {BASE} of {theirs}: these are other steps")


def summary(way: str, base: str, starts: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    ratios = [each[way] / each[base] for each in starts]
    return {
        "way": way,
        "starts": len(starts),
        "seconds": [each[way] for each in starts],
        "seconds_median": statistics.median(each[way] for each in starts),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
    }


def print_table(rows: Sequence[Mapping[str, Any]], options: argparse.Namespace) -> None:
    where = f"on each of {options.hosts} hosts, {options.rate or 'no limit'}" if options.hosts > 1 else "on a host"
    what = f"{options.job.name}, {options.precision}, {options.processes} processes {where}"
    table = Table(title=f"a step of {what}: medians of {options.starts} starts of {options.steps} steps")
    table.add_column("way")
    for name in ("ms", "times its own, heap as it comes" if options.heap else "times DDP", "least - most"):
        table.add_column(name, justify="right")
    for row in rows:
        spread = f"{min(row['ratios']):.3f} - {max(row['ratios']):.3f}"
        table.add_row(WAYS[row["way"]].title, f"{1e3 * row['seconds_median']:.1f}", f"{row['ratio']:.3f}", spread)
    Console().print(table)


if __name__ == "__main__":
    main()
