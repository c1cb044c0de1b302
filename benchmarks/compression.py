"""Measures what a training reaches, and its bytes and time, with each method of `recipe.communication`.

    python benchmarks/compression.py examples/reviews.yaml [--steps 300] [--every 50] [--layout dp2] [--seeds 0,1,2]
        [--methods none,bf16,diloco] [--set recipe.data.limit=3000] [--json build/reviews.json]

The methods train one after the other, with the same recipe, number of steps and seeds, and evaluate every `--every`
steps. Bytes are those that rank 0 sends; with plain data parallelism ("none"), the bytes of its third step times the
number of steps. Seconds are those of the steps, without start and evaluations. The JSON file has the curves: a list
of [step, seconds, bytes, value] for each method and seed. compression_tables.py turns it into tables and pictures
and, with the measurements of compression_links.py, computes the time over slow links. The file is written after each
training, and trainings that it already has are skipped, so an interrupted run can be continued.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from samestep import jobfile
from samestep.api import train_job

# A few tens of outer steps, which is too few for a momentum.
DILOCO: Mapping[str, Any] = {"kind": "diloco", "every": 15, "bits": 4, "outer_lr": 1.0, "outer_momentum": 0.0}
# The options of each method for a training of the given number of steps.
METHODS: Mapping[str, Callable[[int], Mapping[str, Any] | None]] = {
    "none": lambda steps: None,
    "bf16": lambda steps: {"kind": "bf16"},
    "fp16": lambda steps: {"kind": "fp16"},
    "powersgd": lambda steps: {"kind": "powersgd", "rank": 2, "start": max(1, steps // 20)},
    "one-bit-adam": lambda steps: {"kind": "one-bit-adam", "warmup": max(1, steps // 6)},
    "zero-one-adam": lambda steps: {
        "kind": "zero-one-adam",
        "variance_scaler": 4,
        "variance_stop": max(1, steps // 5),
        "local_scaler": max(1, steps // 16),
        "local_most": 16,
    },
    "local-sgd": lambda steps: {"kind": "local-sgd", "every": 10, "start": max(1, steps // 20)},
    "diloco": lambda steps: DILOCO,
    "diloco-streaming": lambda steps: {**DILOCO, "fragments": 4, "overlap": 2},
}
VALUES = ("accuracy", "perplexity", "loss")  # the first of these that an evaluation has is shown
PLAIN = "none"


@dataclass(frozen=True, kw_only=True)
class Trained:
    """One training: a job with one method and one seed."""

    job: str
    method: str
    seed: int
    communication: Mapping[str, Any] | None
    value: str  # name of the metric
    curve: Sequence[tuple[int, float, int, float]]  # step, seconds, bytes that one rank sent, value
    # For each number of bytes that steps sent (as text, since JSON keys are), the count of such steps up to each
    # evaluation.
    kinds: Mapping[str, Sequence[int]]
    step_seconds: float  # median

    @property
    def sent(self) -> int:
        return self.curve[-1][2]

    @property
    def steps(self) -> int:
        return self.curve[-1][0]

    @property
    def reached(self) -> float:
        return self.curve[-1][3]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="+", type=Path)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=50, help="steps from one evaluation to the next")
    parser.add_argument("--layout", default="dp2")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--seeds", default="0", help="seeds of the recipe, by commas")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    methods = options.methods.split(",")
    if unknown := set(methods) - METHODS.keys():
        parser.error(f"--methods: no {', '.join(sorted(unknown))}; there are {', '.join(METHODS)}")
    found = measured(options, methods)
    for each in found:
        fewer = (
            f"{each.sent / 1e6:.1f} MB sent, {each.value} {each.reached:.4f}, {1e3 * each.step_seconds:.0f} ms a step"
        )
        print(f"{each.job}, {each.method}, seed {each.seed}: {fewer}")


def measured(options: argparse.Namespace, methods: Sequence[str]) -> list[Trained]:
    found = kept(options.json)
    for job in options.jobs:
        for seed in map(int, options.seeds.split(",")):
            for method in methods:
                what = (job.stem, method, seed, options.steps, METHODS[method](options.steps))
                if any(what == (each.job, each.method, each.seed, each.steps, each.communication) for each in found):
                    continue
                print(f"{job.stem}, {method}, seed {seed}", file=sys.stderr, flush=True)
                found.append(train(job, method, seed, options))
                if options.json is not None:
                    options.json.write_text(json.dumps([asdict(each) for each in found], indent=1) + "\n", "utf-8")
    return found


def kept(file: Path | None) -> list[Trained]:
    """Read the trainings in a file; empty without a file."""
    if file is None or not file.exists():
        return []
    return [Trained(**each) for each in json.loads(file.read_text(encoding="utf-8"))]


def overrides(method: str, steps: int, folder: Path, further: Sequence[str]) -> list[tuple[str, str]]:
    """The keys that a method's training changes in the job file; `further` are KEY=VALUE."""
    return [
        ("recipe.epochs", "null"),
        ("recipe.steps", str(steps)),
        ("recipe.communication", json.dumps(METHODS[method](steps))),
        ("run.folder", str(folder)),
        ("run.log", "[]"),
        ("run.sparse_rows", "off"),  # whole gradients are the baseline
        *((key, value) for key, _, value in (each.partition("=") for each in further)),
    ]


def train(file: Path, method: str, seed: int, options: argparse.Namespace) -> Trained:
    with TemporaryDirectory(prefix="samestep-compression-") as place:
        folder = Path(place) / "run"
        given = [
            *overrides(method, options.steps, folder, options.set),
            ("recipe.seed", str(seed)),
            ("recipe.evaluation.every", str(options.every)),
            ("run.layout", options.layout),
        ]
        train_job(jobfile.load(file, [(key, value, "benchmark") for key, value in given]).job)
        steps = records(folder / "metrics.jsonl")
        evaluations = records(folder / "evaluations.jsonl")
        sent = sent_by_steps(folder)
    value = next(name for name in VALUES if name in evaluations[-1])
    until = [line["step"] for line in evaluations]
    seconds = [step["step_seconds"] for step in steps]
    return Trained(
        job=file.stem,
        method=method,
        seed=seed,
        communication=METHODS[method](options.steps),
        value=value,
        curve=[
            (line["step"], sum(seconds[:end]), sum(sent[:end]), line[value])
            for end, line in zip(until, evaluations, strict=True)
        ],
        kinds={str(kind): [sent[:end].count(kind) for end in until] for kind in sorted({*sent})},
        step_seconds=statistics.median(seconds),
    )


def sent_by_steps(folder: Path) -> list[int]:
    """Bytes that rank 0 sent in each step of a training."""
    usage = json.loads((folder / "report.json").read_text(encoding="utf-8"))["usage_bytes"]
    plain = sum(usage[0]["sent"].values()) if usage else 0  # of the step that was measured
    return [step.get("sent_bytes", plain) for step in records(folder / "metrics.jsonl")]


def records(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    main()
