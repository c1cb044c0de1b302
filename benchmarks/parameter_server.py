"""Synchronous and asynchronous parameter servers beside all-reduce: time and accuracy, also with one slow worker.

    python benchmarks/parameter_server.py [--workers 2] [--servers 1] [--epochs 5] [--slow 0.05] [--repeats 1]
                                          [--json FILE] [--markdown FILE]

The job is examples/digits.yaml. All-reduce has as many ranks as the others have workers. A slow worker sleeps so many
seconds in every step. The methods take turns; of several repeats the median counts.
"""

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from samestep import jobfile
from samestep.api import train_job
from samestep.job import Inject, Job

DIGITS = Path(__file__).resolve().parent.parent / "examples" / "digits.yaml"


@dataclass(frozen=True, kw_only=True)
class Method:
    """What takes the steps; without settings it is all-reduce."""

    name: str
    settings: Mapping[str, Any] | None = None


METHODS = (
    Method(name="all-reduce (native)"),
    Method(name="server, synchronous", settings={"staleness": 0}),
    Method(name="server, staleness 2", settings={"staleness": 2}),
    Method(name="server, staleness infinite", settings={"staleness": "infinite"}),
    Method(
        name="server, staleness infinite, compensated",
        settings={"staleness": "infinite", "delay_compensation": 0.04},
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--slow", type=float, default=0.05, help="seconds that the slow worker sleeps in a step")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    runs = [
        {"method": method.name, "slow": slow, **measure(method, options, slow)}
        for _ in range(options.repeats)
        for slow in (0.0, options.slow)
        for method in METHODS
    ]
    rows = [
        summary(method.name, slow, [run for run in runs if (run["method"], run["slow"]) == (method.name, slow)])
        for slow in (0.0, options.slow)
        for method in METHODS
    ]
    title = (
        f"digits, {options.workers} workers, {options.servers} servers, {runs[0]['steps']} steps, "
        f"median of {options.repeats}"
    )
    table = Table(title=title)
    for name in HEADINGS:
        table.add_column(name)
    for row in rows:
        table.add_row(*row)
    Console(width=130).print(table)
    if options.json is not None:
        options.json.write_text(json.dumps({"title": title, "runs": runs}, indent=1) + "\n", encoding="utf-8")
    if options.markdown is not None:
        options.markdown.write_text(markdown(rows), encoding="utf-8")


HEADINGS = (
    "method",
    "slow worker",
    "ms a step",
    "accuracy",
    "final loss",
    "updates late, mean",
    "most",
    "steps ahead",
)


def measure(method: Method, options: argparse.Namespace, slow: float) -> dict[str, Any]:
    """Train once, and say how long a step took and what was reached."""
    job = jobfile.load(DIGITS).job
    serves = method.settings is not None
    with TemporaryDirectory(prefix="samestep-parameter-server-") as folder:
        run = replace(
            job.run,
            layout=f"dp{options.workers + (options.servers if serves else 0)}",
            threads=1,
            device="cpu",
            tensorboard=False,
            folder=Path(folder) / "run",
        )
        if serves:
            file = Path(folder) / "servers.yaml"
            file.write_text(yaml.safe_dump({"servers": options.servers, **(method.settings or {})}), encoding="utf-8")
            run = replace(run, engine="parameter-server", engine_config=file)
        if slow:
            last = options.workers - 1 + (options.servers if serves else 0)
            run = replace(run, inject=(Inject(rank=last, step=0, fault="slow", seconds=slow),))
        found = train_job(Job(recipe=replace(job.recipe, epochs=options.epochs), run=run))
        report = json.loads((Path(folder) / "run" / "report.json").read_text(encoding="utf-8"))
    return {
        "seconds": found.seconds,
        "steps": found.steps,
        "accuracy": found.metrics["accuracy"],
        "loss": found.losses[-1],
        "measured": report.get("engine_measured", {}),
    }


def summary(name: str, slow: float, runs: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """The medians of a method's runs as a row."""

    def median(key: str) -> float:
        return statistics.median(run[key] for run in runs)

    def of_engine(key: str) -> str:
        values = [run["measured"][key] for run in runs if key in run["measured"]]
        return f"{statistics.median(values):.1f}".removesuffix(".0") if values else ""

    return (
        name,
        f"{1e3 * slow:.0f} ms" if slow else "none",
        f"{1e3 * statistics.median(run['seconds'] / run['steps'] for run in runs):.1f}",
        f"{100 * median('accuracy'):.1f} %",
        f"{median('loss'):.3f}",
        of_engine("mean_age_in_updates"),
        of_engine("oldest_in_updates"),
        of_engine("most_steps_ahead"),
    )


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """The table as it stands in the documentation."""
    lines = [HEADINGS, ["---"] * len(HEADINGS), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    main()
