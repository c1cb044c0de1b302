"""Compares plain replicas with those that send embedding rows (`run.sparse_rows`) or share one copy of parameters.

    python benchmarks/replicas.py recommender --ways dense,rows,shared       # two ranks on this host
    python benchmarks/replicas.py recommender --hosts 2 --rate 1gbit         # a rank on each of two hosts
    python benchmarks/replicas.py examples/reviews.yaml --set recipe.data.limit=4000 --json build/reviews.json
    python benchmarks/replicas.py wide --memory                             # resident memory of 2, 3 and 4 ranks

`shared` is `run.share_replicas`. The hosts of `--hosts` are made from Linux namespaces (root needed; see
tools/testbed); on hosts of your own a launcher starts this script on every rank. Rank 0 prints. The tables of
docs/communication.md are written from files of `--json` by benchmarks/replicas_tables.py. All
ways train in the same ranks with the same recipe, a few steps of each in turns, so that other load on the machine
affects all. A way's time is the median over rounds of the slowest rank's time per step, and its ratio is the median
of the rounds' ratios to the first way.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

import torch
import torch.distributed as dist
from page_parts import markdown_table
from torch import Tensor, nn

import samestep
from samestep import environment, jobfile
from samestep.comm.shared_memory.backend import for_transport
from samestep.job import Job, Run
from samestep.launch import local
from samestep.launch.world import join
from samestep.layout import Layout
from samestep.tasks.registry import resolve
from samestep.training.fit import Training

WAYS: Mapping[str, Mapping[str, Any]] = {
    "dense": {"sparse_rows": "off"},
    "rows": {"sparse_rows": "on"},
    "shared": {"share_replicas": True, "sparse_rows": "off"},
}


class Recommender(nn.Module):
    """Scores a user and an item from an embedding of each: 150,000 x 64 numbers and a small net."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(100_000, 64), nn.Embedding(50_000, 64)
        self.head = nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 2))

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.cat([self.users(ids[:, 0]), self.items(ids[:, 1])], dim=1))


class Clicks(samestep.Task):
    """Random clicks of users on items; popular items come up more often."""

    kind: type[nn.Module] = Recommender

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        skewed = torch.rand(200_000, 2, generator=generator) ** 3
        self.ids = (skewed * torch.tensor([100_000, 50_000])).long()
        self.labels = torch.randint(2, (200_000,), generator=generator)

    def model(self) -> nn.Module:
        return self.kind()

    def train_set(self) -> samestep.Samples:
        return range(len(self.labels))

    def collate(self, samples: Sequence[Any]) -> samestep.Batch:
        return samestep.Batch(self.ids[list(samples)], self.labels[list(samples)])

    def loss(self, output: Tensor, batch: samestep.Batch) -> tuple[Tensor, int]:
        return nn.functional.cross_entropy(output, batch.targets, reduction="sum"), len(output)

    def eval_set(self) -> None:
        return None

    def metrics(self) -> Mapping[str, Any]:
        return {}


class Wide(nn.Sequential):
    """28 million parameters in matrices; the input is the two ids as numbers."""

    def __init__(self) -> None:
        layers = [layer for _ in range(6) for layer in (nn.Linear(2160, 2160), nn.ReLU())]
        super().__init__(nn.Linear(2, 2160), *layers, nn.Linear(2160, 2))

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input / 100_000)


class WideClicks(Clicks):
    kind = Wide


def recipe_of(options: argparse.Namespace) -> samestep.Recipe:
    made = {"recommender": Clicks, "wide": WideClicks}
    if options.job in made:
        batch = options.batch or (1024 if options.job == "recommender" else 32)
        return samestep.Recipe(task=made[options.job](), batch=batch, epochs=99, optimizer=samestep.AdamW(lr=1e-3))
    pairs = [each.partition("=") for each in options.set]
    overrides = [(key, value, "--set") for key, _, value in pairs]
    return jobfile.load(Path(options.job), overrides).job.recipe


def trainings(options: argparse.Namespace, world: Any) -> dict[str, tuple[Training, Iterator[Any]]]:
    recipe = recipe_of(options)
    layout = Layout.parse(f"dp{world.world_size}")
    made = {}
    for way in options.ways.split(","):
        run = Run(layout=str(layout), threads=1, **WAYS[way])
        training = Training(Job(recipe=recipe, run=run), resolve(recipe), world, layout)
        made[way] = training, training.steps(measured=2)
    return made


def measure(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Measure on this rank, by way: seconds per step in each round, and the bytes that ranks hold and send."""
    with join(device="cpu", threads=1, cpu_backend=for_transport(options.transport)) as world:
        made = trainings(options, world)
        for _, steps in made.values():
            for _ in range(4):  # the third is measured
                next(steps)
        seconds: dict[str, list[float]] = {way: [] for way in made}
        for _ in range(options.rounds):
            for way, (_, steps) in made.items():
                dist.barrier()
                began = time.perf_counter()
                for _ in range(options.steps):
                    next(steps)
                own = torch.tensor((time.perf_counter() - began) / options.steps)
                dist.all_reduce(own, dist.ReduceOp.MAX)
                seconds[way].append(own.item())
        usages = {way: training.usage for way, (training, _) in made.items()}
        return {way: {"seconds": seconds[way], "usage": usage and usage.to_json()} for way, usage in usages.items()}


def memory(options: argparse.Namespace) -> list[float]:
    """Each rank's proportional set size (MiB), which divides shared pages, after a few steps of one way."""
    with join(device="cpu", threads=1, cpu_backend=for_transport(options.transport)) as world:
        ((_, steps),) = trainings(options, world).values()
        for _ in range(4):
            next(steps)
        dist.barrier()
        text = Path("/proc/self/smaps_rollup").read_text(encoding="ascii")
        own = next(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:")) / 1024
        everyone: list[Any] = [None] * world.world_size
        dist.all_gather_object(everyone, own)
        return everyone


def on_ranks(function: Any, options: argparse.Namespace, processes: int) -> Any:
    return function(options) if environment.ranks() else local.start(function, (options,), processes)


def print_memory(options: argparse.Namespace) -> None:
    found: dict[str, dict[int, float]] = {}
    lines = []
    for way in options.ways.split(","):
        totals = found[way] = {}
        for processes in (2, 3, 4):
            chosen = argparse.Namespace(**{**vars(options), "ways": way})
            totals[processes] = sum(on_ranks(memory, chosen, processes))
            more = totals[processes] - totals[processes - 1] if processes > 2 else None
            lines.append([str(processes), way, f"{totals[processes]:.0f}", "" if more is None else f"{more:.0f}"])
    print(markdown_table(["ranks", "way", "Pss of all ranks, MiB", "per rank more, MiB"], lines, align="rlr"))
    if options.json:
        options.json.write_text(json.dumps({"job": options.job, "memory": found}) + "\n", encoding="utf-8")


def print_times(options: argparse.Namespace) -> None:
    if options.hosts > 1 and environment.ranks() is None:
        start_on_hosts(options)
        return
    found = on_ranks(measure, options, options.processes)
    ranks = environment.ranks()
    if ranks is not None and ranks.rank != 0:
        return
    first = next(iter(found.values()))["seconds"]
    lines = []
    for way, row in found.items():
        usage = row["usage"]
        held = [usage[key] / 1e6 for key in ("parameters", "gradients", "optimizer_state")]
        sent = sum(usage["sent"].values()) / 1e3
        middle = statistics.median(row["seconds"]) * 1e3
        times = f"{speed(first, row['seconds']):.2f}"
        lines.append([way, f"{middle:.1f}", times, f"{sent:,.0f}", ", ".join(f"{each:.1f}" for each in held)])
    titles = ["way", "ms a step", "x the first's speed", "kB sent a step", "parameters, gradients, state, MB"]
    print(markdown_table(titles, lines))
    if options.json:
        options.json.write_text(
            json.dumps({"job": options.job, "hosts": options.hosts, "ways": found}) + "\n", encoding="utf-8"
        )


def speed(first: Sequence[float], seconds: Sequence[float]) -> float:
    """The median over the rounds of how many times as fast a way is as the first."""
    return statistics.median(theirs / mine for theirs, mine in zip(first, seconds, strict=True))


def start_on_hosts(options: argparse.Namespace) -> None:
    """Start this script by torchrun on hosts that are made for it, a rank on each; rank 0 prints."""
    from testbed import Testbed

    script, mine = str(Path(__file__).resolve()), sys.argv[1:]
    with Testbed(options.hosts, ssh=False) as bed:
        bed.limit(options.rate)
        meeting = [f"--nnodes={options.hosts}", f"--master-addr={bed.hosts[0].name}", "--master-port=29500"]
        running = []
        for number, host in enumerate(bed.hosts):
            ranks = [sys.executable, "-m", "torch.distributed.run", *meeting, f"--node-rank={number}"]
            command = [*ranks, "--nproc-per-node=1", script, *mine]
            running.append(host.start(command, env={"OMP_NUM_THREADS": "1"}, cwd=Path.cwd()))
        told = [each.finish(TIME_LIMIT) for each in running]
    print(told[0])


TIME_LIMIT = 600.0  # seconds of the ranks on hosts

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", help="recommender, wide, or a job file")
    parser.add_argument("--ways", default="dense,rows", help=", ".join(WAYS))
    parser.add_argument("--processes", type=int, default=2, help="on this host")
    parser.add_argument("--hosts", type=int, default=1, help="made on this machine, with a rank on each")
    parser.add_argument("--rate", help="of each host's link, such as 1gbit or 100mbit")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=5, help="of a way in each round")
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--set", action="append", default=[], help="key=value, laid over a job file")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    (print_memory if given.memory else print_times)(given)
