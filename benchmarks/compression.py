"""What a training reaches for the bytes and the time that it takes, with each method of `recipe.communication`.

    python benchmarks/compression.py examples/reviews.yaml [--steps 300] [--every 50] [--layout dp2]
        [--methods none,bf16,diloco] [--set recipe.data.limit=3000] [--json FILE]

Every method trains the same recipe from the same weights for the same number of steps, one after the other, and is
evaluated every so many steps. Bytes are those that rank 0 sends; with plain data parallelism ("none") the bytes of
its third step times the steps. Seconds are those of the steps, without start and evaluations. The JSON file holds the
curves: a list of [step, seconds, bytes, value] for each method.
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.table import Table

from samestep import jobfile
from samestep.api import train_job

# Options that fit a training of so many steps.
METHODS: Mapping[str, Callable[[int], dict[str, Any] | None]] = {
    "none": lambda steps: None,
    "bf16": lambda steps: {"kind": "bf16"},
    "powersgd": lambda steps: {"kind": "powersgd", "rank": 2, "start": max(1, steps // 20)},
    "one-bit-adam": lambda steps: {"kind": "one-bit-adam", "warmup": max(1, steps // 5)},
    "zero-one-adam": lambda steps: {
        "kind": "zero-one-adam",
        "variance_stop": max(1, steps // 3),
        "local_scaler": max(1, steps // 10),
    },
    "local-sgd": lambda steps: {"kind": "local-sgd", "every": 10, "start": max(1, steps // 20)},
    "diloco": lambda steps: {"kind": "diloco", "every": max(2, steps // 6)},
    "diloco-streaming": lambda steps: {"kind": "diloco", "every": max(4, steps // 6), "fragments": 4, "overlap": 2},
}
VALUES = ("accuracy", "perplexity", "loss")  # the first of these that an evaluation gives is shown


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What one method did with one job."""

    job: str
    method: str
    communication: Mapping[str, Any] | None
    value: str  # what is measured
    curve: Sequence[tuple[int, float, int, float]]  # step, seconds, bytes that one rank sent, value
    step_seconds: float  # median

    @property
    def sent(self) -> int:
        return self.curve[-1][2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="+", type=Path)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=50, help="steps from one evaluation to the next")
    parser.add_argument("--layout", default="dp2")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: list[Trained] = []
    for job in options.jobs:
        for method in options.methods.split(","):
            found.append(train(job, method, options))
            if options.json is not None:
                options.json.write_text(json.dumps([asdict(each) for each in found], indent=1) + "\n", "utf-8")
        show([each for each in found if each.job == job.stem])


def train(file: Path, method: str, options: argparse.Namespace) -> Trained:
    communication = METHODS[method](options.steps)
    with TemporaryDirectory(prefix="samestep-compression-") as place:
        folder = Path(place) / "run"
        given = [
            ("recipe.epochs", "null"),
            ("recipe.steps", str(options.steps)),
            ("recipe.evaluation.every", str(options.every)),
            ("recipe.communication", json.dumps(communication)),
            ("run.layout", options.layout),
            ("run.folder", str(folder)),
            ("run.tensorboard", "false"),
            ("run.sparse_rows", "off"),  # whole gradients are what all else is held against
            *(tuple(each.partition("=")[::2]) for each in options.set),
        ]
        result = train_job(jobfile.load(file, [(key, value, "benchmark") for key, value in given]).job)
        steps = lines_of(folder / "metrics.jsonl")
        evaluations = lines_of(folder / "evaluations.jsonl")
    each_step = result.usage[0].sent_in_all if result.usage else 0
    value = next(name for name in VALUES if name in evaluations[-1])
    curve: list[tuple[int, float, int, float]] = []
    for line in evaluations:
        before = steps[: line["step"]]
        seconds = sum(step["step_seconds"] for step in before)
        sent = sum(step.get("sent_bytes", each_step) for step in before)
        curve.append((line["step"], seconds, sent, line[value]))
    taken = sorted(step["step_seconds"] for step in steps)
    return Trained(
        job=file.stem,
        method=method,
        communication=communication,
        value=value,
        curve=curve,
        step_seconds=taken[len(taken) // 2],
    )


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def show(rows: Sequence[Trained]) -> None:
    table = Table(title=f"{rows[0].job}: {rows[0].curve[-1][0]} steps")
    for name in ("method", "MB sent", "x fewer", "ms a step", *(f"at step {point[0]}" for point in rows[0].curve)):
        table.add_column(name, justify="right")
    for row in rows:
        fewer = rows[0].sent / row.sent if row.sent else float("nan")
        values = [f"{point[3]:.3f}" for point in row.curve]
        table.add_row(row.method, f"{row.sent / 1e6:.2f}", f"{fewer:.1f}", f"{1e3 * row.step_seconds:.0f}", *values)
    Console().print(table)
    print(f"values are {rows[0].value}")


if __name__ == "__main__":
    main()
