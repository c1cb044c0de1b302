"""Compares synchronous and asynchronous parameter servers with all-reduce: time and accuracy, also with slow workers.

    python benchmarks/parameter_server.py [--workers 2] [--servers 1] [--epochs 5] [--slow 0.05] [--repeats 1]
                                          [--json FILE] [--docs]

The job is examples/digits.yaml. All-reduce has as many ranks as the servers have workers. There are three cases: no
delay; one worker that sleeps `--slow` seconds in every step; and workers that do so in turns, each for a few steps,
as if other jobs disturbed one host after the other. The methods take turns, and the result is the median of the
repeats. `--docs` writes the table of docs/parameter-server.md and docs/zh/parameter-server.md.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

import yaml
from page_parts import MeasuredTable, markdown_table
from rich.console import Console
from rich.table import Table
from torch import Tensor

from samestep import environment, jobfile
from samestep.api import train_job
from samestep.data.types import Batch
from samestep.job import Job
from samestep.tasks.image_classification import ImageClassification, ImageData, ImageModel

DIGITS = Path(__file__).resolve().parent.parent / "examples" / "digits.yaml"


TURN = 2  # steps for which a worker is slow in its turn


class Disturbed(ImageClassification):
    """Image classification with a loss that sleeps on some workers in some steps."""

    def __init__(
        self, *, data: ImageData, model: ImageModel, slow: str, seconds: float, first: int, workers: int
    ) -> None:
        """`slow`: no worker, one worker, or all in turns; `first`: the first worker's rank."""
        super().__init__(data=data, model=model)
        ranks = environment.ranks()
        self._worker = ranks.rank - first if ranks is not None else -1
        self._slow = slow
        self._seconds = seconds
        self._workers = workers
        self._step = 0

    def loss(self, output: Tensor, batch: Batch) -> tuple[Tensor, int]:
        turn = self._step // TURN % self._workers if self._slow == TURNS else self._workers - 1
        self._step += 1
        if self._slow != NONE and self._worker == turn:
            time.sleep(self._seconds)
        return super().loss(output, batch)


NONE, ONE, TURNS = "none", "one", "in turns"


@dataclass(frozen=True, kw_only=True)
class Method:
    """A method to compare: all-reduce, or parameter servers with these settings."""

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
    parser.add_argument("--slow", type=float, default=0.05, help="seconds that a slow worker sleeps in a step")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--docs", action="store_true", help="write the table into the docs")
    options = parser.parse_args()
    runs = [
        {"method": method.name, "slow": slow, **measure(method, options, slow)}
        for _ in range(options.repeats)
        for slow in (NONE, ONE, TURNS)
        for method in METHODS
    ]
    rows = [
        summary(method.name, slow, [run for run in runs if (run["method"], run["slow"]) == (method.name, slow)])
        for slow in (NONE, ONE, TURNS)
        for method in METHODS
    ]
    title = (
        f"digits, {options.workers} workers, {options.servers} servers, {runs[0]['steps']} steps, "
        f"median of {options.repeats}"
    )
    table = Table(title=title)
    for name in HEADINGS["en"]:
        table.add_column(name)
    for row in rows:
        table.add_row(*cells(row, "en"))
    Console(width=130).print(table)
    if options.json is not None:
        options.json.write_text(json.dumps({"title": title, "runs": runs}, indent=1) + "\n", encoding="utf-8")
    if options.docs:
        TABLE.keep(rows)


def measure(method: Method, options: argparse.Namespace, slow: str) -> dict[str, Any]:
    """Train once; returns the time of a step and the result."""
    job = jobfile.load(DIGITS).job
    serves = method.settings is not None
    with TemporaryDirectory(prefix="samestep-parameter-server-") as folder:
        run = replace(
            job.run,
            layout=f"dp{options.workers + (options.servers if serves else 0)}",
            threads=1,
            device="cpu",
            log=(),
            check=False,
            folder=Path(folder) / "run",
        )
        if serves:
            file = Path(folder) / "servers.yaml"
            file.write_text(yaml.safe_dump({"servers": options.servers, **(method.settings or {})}), encoding="utf-8")
            run = replace(run, engine="parameter-server", engine_config=file)
        args = {"slow": slow, "seconds": options.slow, "workers": options.workers}
        args |= {"first": options.servers if serves else 0}
        recipe = replace(job.recipe, task=f"{__file__}:Disturbed", args=args, epochs=options.epochs)
        found = train_job(Job(recipe=recipe, run=run))
        report = json.loads((Path(folder) / "run" / "report.json").read_text(encoding="utf-8"))
    return {
        "seconds": found.seconds,
        "steps": found.steps,
        "accuracy": found.metrics["accuracy"],
        "loss": found.losses[-1],
        "measured": report.get("engine_measured", {}),
    }


def summary(name: str, slow: str, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The medians of a method's runs; what only an asynchronous server measures is left out of the others."""

    def median(key: str) -> float:
        return statistics.median(run[key] for run in runs)

    def of_engine(key: str) -> dict[str, float]:
        values = [run["measured"][key] for run in runs if key in run["measured"]]
        return {key: statistics.median(values)} if values else {}

    return {
        "method": name,
        "slow": slow,
        "ms": 1e3 * statistics.median(run["seconds"] / run["steps"] for run in runs),
        "accuracy": median("accuracy"),
        "loss": median("loss"),
        **{key: value for each in OF_ENGINE for key, value in of_engine(each).items()},
    }


def cells(row: Mapping[str, Any], language: str) -> list[str]:
    """A row of the table."""
    method = row["method"]
    for english, chinese in CHINESE.items() if language == "zh" else ():
        method = method.replace(english, chinese)
    return [
        method,
        SLOW[language][row["slow"]],
        f"{row['ms']:.1f}",
        f"{100 * row['accuracy']:.1f} %",
        f"{row['loss']:.3f}",
        *(f"{row[each]:.1f}".removesuffix(".0") if each in row else "" for each in OF_ENGINE),
    ]


def markdown(rows: Sequence[Mapping[str, Any]], language: str) -> str:
    return markdown_table(HEADINGS[language], [cells(row, language) for row in rows], align="l")


OF_ENGINE = ("mean_age_in_updates", "oldest_in_updates", "most_steps_ahead")
SLOW = {"en": {NONE: NONE, ONE: ONE, TURNS: TURNS}, "zh": {NONE: "无", ONE: "一个", TURNS: "轮流"}}
CHINESE = {
    " (native)": "（native）",
    "server, ": "服务器，",
    "synchronous": "同步",
    ", compensated": "，带补偿",
}
HEADINGS: Mapping[str, Sequence[str]] = {
    "en": (
        "method",
        "slow worker",
        "ms a step",
        "accuracy",
        "final loss",
        "updates late, mean",
        "most",
        "steps ahead",
    ),
    "zh": ("方法", "慢 worker", "每步毫秒", "准确率", "最后的损失", "平均晚几次更新", "最多", "领先步数"),
}
TABLE = MeasuredTable(
    name="parameter-server",
    part="benchmarks/parameter_server.py",
    page="docs/parameter-server.md",
    text=markdown,
)


if __name__ == "__main__":
    main()
