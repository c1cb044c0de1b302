"""Measures the time of a step over slow links, with each method of `recipe.communication`.

    python benchmarks/compression_links.py examples/reviews.yaml [--links 1gbit,100mbit,100mbit+20ms] [--steps 38]
        [--methods none,diloco] [--set KEY=VALUE] [--json build/links.json]

Each method trains for a few steps on two hosts with one rank each, made from Linux namespaces (root needed; see
tools/testbed). Their link has the given rate in each direction and, with `+20ms`, that delay in each direction. A
method takes steps of several kinds, which differ in what they send (warm-up, exchange, between two exchanges), so the
JSON file has the seconds of each step by the number of bytes that it sent. From the mean of each kind, and the number
of such steps in a whole training, compression_tables.py computes the training's time over the link. It takes means
because messages that overlap later steps slow those steps instead.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

from rich.console import Console
from rich.table import Table
from testbed import Cable, Testbed, why_not

from benchmarks.compression import METHODS, overrides, records, sent_by_steps

SETTLE = 5  # steps until memory is allocated and caches are warm
LINKS = "1gbit,100mbit,100mbit+20ms"
TIME_LIMIT = 400.0  # seconds of one training


@dataclass(frozen=True, kw_only=True)
class OverLink:
    """The measured steps of a method over a link."""

    job: str
    method: str
    link: str
    kinds: Mapping[str, Sequence[float]]  # bytes that rank 0 sent in a step -> seconds of each such step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", type=Path)
    parser.add_argument("--links", default=LINKS, help="RATE or RATE+DELAYms, by commas; a RATE is 1gbit or 100mbit")
    parser.add_argument("--steps", type=int, default=38)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if reason := why_not(ssh=False):
        raise SystemExit(f"no hosts can be made here: {reason}")
    found: list[OverLink] = []
    for link in options.links.split(","):
        for method in options.methods.split(","):
            print(f"{options.job.stem}, {method}, {link}", file=sys.stderr, flush=True)
            found.append(measure(options, method, link))
            if options.json is not None:
                options.json.write_text(json.dumps([asdict(each) for each in found], indent=1) + "\n", "utf-8")
    show(found)


def made_hosts(link: str) -> tuple[Testbed, str | None]:
    """Make two hosts joined by the link; returns them, and the rate if it is still to be set."""
    rate, _, delay = link.partition("+")
    if not delay:
        return Testbed(2, ssh=False), rate
    megabits = float(rate.removesuffix("mbit")) if rate.endswith("mbit") else 1e3 * float(rate.removesuffix("gbit"))
    cable = Cable(delay_ms=float(delay.removesuffix("ms")), rate_mbit=megabits)
    return Testbed(2, racks=2, cable=cable, ssh=False), None


def measure(options: argparse.Namespace, method: str, link: str) -> OverLink:
    with TemporaryDirectory(prefix="samestep-links-") as place:
        folder = Path(place) / "run"
        given = overrides(method, options.steps, folder, options.set)
        # All hosts share this machine's cores, and each would otherwise give all of them to its rank.
        given += [("recipe.evaluation.at_end", "false"), ("run.layout", "dp2"), ("run.threads", "1")]
        settings = [word for key, value in given for word in ("--set", f"{key}={value}")]
        hosts, rate = made_hosts(link)
        with hosts as bed:
            bed.limit(rate)
            running = []
            for number, host in enumerate(bed.hosts):
                ranks = ["--nnodes=2", "--nproc-per-node=1", f"--node-rank={number}"]
                ranks += [f"--master-addr={bed.hosts[0].name}", "--master-port=29500"]
                command = [sys.executable, "-m", "torch.distributed.run", *ranks, "-m", "samestep", "train"]
                command += [str(options.job.resolve()), *settings]
                running.append(host.start(command, env={"OMP_NUM_THREADS": "1"}, cwd=Path(place)))
            for each in running:
                each.finish(TIME_LIMIT)
        steps = records(folder / "metrics.jsonl")
        sent = sent_by_steps(folder)
    kinds: dict[str, list[float]] = {}
    for step, number in list(zip(steps, sent, strict=True))[SETTLE:]:
        kinds.setdefault(str(number), []).append(step["step_seconds"])
    return OverLink(job=options.job.stem, method=method, link=link, kinds=dict(sorted(kinds.items())))


def show(found: Sequence[OverLink]) -> None:
    table = Table(title=f"{found[0].job}: seconds of a step, by the bytes that it sent")
    for name in ("link", "method", "bytes", "steps", "mean", "median"):
        table.add_column(name, justify="right")
    for each in found:
        for kind, seconds in each.kinds.items():
            values = [f"{of(seconds):.4f}" for of in (statistics.mean, statistics.median)]
            table.add_row(each.link, each.method, f"{int(kind):,}", str(len(seconds)), *values)
    Console().print(table)


if __name__ == "__main__":
    main()
