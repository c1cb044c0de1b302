"""What a training reaches for the bytes and the time that it takes, with each method of `recipe.communication`.

    python benchmarks/compression.py examples/reviews.yaml [--steps 300] [--every 50] [--layout dp2] [--seeds 0,1,2]
        [--methods none,bf16,diloco] [--set recipe.data.limit=3000] [--json FILE] [--docs]
    python benchmarks/compression.py --read FILE ... --docs       # tables and curves of what was measured before

Every method trains the same recipe for the same number of steps, one after the other, with each of the seeds, and is
evaluated every so many steps. Bytes are those that rank 0 sends; with plain data parallelism ("none") the bytes of
its third step times the steps. Seconds are those of the steps, without start and evaluations. The JSON file holds the
curves: a list of [step, seconds, bytes, value] for each method and seed. A table has means over the seeds, with the
least and the most, and says whether a method's mean is within what plain data parallelism has over the seeds.
`--docs` writes tables into docs/less-communication.md and its Chinese page, and a picture of the curves of each job
and number of steps into docs/pictures.
"""

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.table import Table

from samestep import jobfile
from samestep.api import train_job
from samestep.display.curves_svg import COLOURS, Curve, Panel, Scale, svg

# Options that fit a training of so many steps.
METHODS: Mapping[str, Callable[[int], dict[str, Any] | None]] = {
    "none": lambda steps: None,
    "bf16": lambda steps: {"kind": "bf16"},
    "powersgd": lambda steps: {"kind": "powersgd", "rank": 2, "start": max(1, steps // 20)},
    "one-bit-adam": lambda steps: {"kind": "one-bit-adam", "warmup": max(1, steps // 6)},
    "zero-one-adam": lambda steps: {
        "kind": "zero-one-adam",
        "variance_scaler": 8,
        "variance_stop": max(1, steps // 2),
        "local_scaler": max(1, steps // 8),
        "local_most": 4,
    },
    "local-sgd": lambda steps: {"kind": "local-sgd", "every": 10, "start": max(1, steps // 20)},
    "diloco": lambda steps: {"kind": "diloco", "every": 16, "bits": 4, "outer_lr": 1.0, "outer_momentum": 0.0},
    "diloco-streaming": lambda steps: {"kind": "diloco", "every": 16, "fragments": 4, "overlap": 2, "bits": 4},
}
VALUES = ("accuracy", "perplexity", "loss")  # the first of these that an evaluation gives is shown
PLAIN = "none"
DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGES = {"en": DOCS / "less-communication.md", "zh": DOCS / "zh" / "less-communication.md"}
MARKS = re.compile(r"(<!-- benchmarks/compression.py -->\n).*?(<!-- end -->)", re.DOTALL)
WORDS: Mapping[str, Mapping[str, str]] = {
    "en": {
        "heads": "method | MB sent | x fewer | {value} at the end (least to most) | within the spread of `none`",
        "title": "`examples/{job}.yaml`, {steps} steps, {seeds} seeds:",
        "one": "`examples/{job}.yaml`, {steps} steps, one seed:",
        "picture": "![{value} over bytes sent]({file})",
        "yes": "yes",
        "no": "no",
        "accuracy": "accuracy",
        "perplexity": "perplexity",
        "loss": "loss",
    },
    "zh": {
        "heads": "方法 | 发送 MB | 少多少倍 | 最后的{value}（最小到最大） | 在 `none` 的种子之间",
        "title": "`examples/{job}.yaml`，{steps} 步，{seeds} 个种子：",
        "one": "`examples/{job}.yaml`，{steps} 步，一个种子：",
        "picture": "![{value}与发送的字节]({file})",
        "yes": "是",
        "no": "否",
        "accuracy": "准确率",
        "perplexity": "困惑度",
        "loss": "损失",
    },
}


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What one method did with one job and one seed."""

    job: str
    method: str
    seed: int
    communication: Mapping[str, Any] | None
    value: str  # what is measured
    curve: Sequence[tuple[int, float, int, float]]  # step, seconds, bytes that one rank sent, value
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
    parser.add_argument("jobs", nargs="*", type=Path)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=50, help="steps from one evaluation to the next")
    parser.add_argument("--layout", default="dp2")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--seeds", default="0", help="seeds of the recipe, by commas")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--read", type=Path, nargs="+", help="JSON files of this program: nothing is trained")
    parser.add_argument("--docs", action="store_true", help="write tables and pictures into the docs")
    options = parser.parse_args()
    if bool(options.jobs) == bool(options.read):
        parser.error("give job files, or --read with files that were measured before")
    methods = options.methods.split(",")
    if unknown := set(methods) - METHODS.keys():
        parser.error(f"--methods: no {', '.join(sorted(unknown))}; there are {', '.join(METHODS)}")
    if options.read:
        found = [Trained(**each) for file in options.read for each in json.loads(file.read_text("utf-8"))]
    else:
        found = measured(options, methods)
    for rows in by_training(found):
        show(rows)
    if options.docs:
        write_docs(by_training(found))


def measured(options: argparse.Namespace, methods: Sequence[str]) -> list[Trained]:
    found: list[Trained] = []
    for job in options.jobs:
        for seed in map(int, options.seeds.split(",")):
            for method in methods:
                print(f"{job.stem}, {method}, seed {seed}", file=sys.stderr, flush=True)
                found.append(train(job, method, seed, options))
                if options.json is not None:
                    options.json.write_text(json.dumps([asdict(each) for each in found], indent=1) + "\n", "utf-8")
    return found


def train(file: Path, method: str, seed: int, options: argparse.Namespace) -> Trained:
    communication = METHODS[method](options.steps)
    with TemporaryDirectory(prefix="samestep-compression-") as place:
        folder = Path(place) / "run"
        given = [
            ("recipe.epochs", "null"),
            ("recipe.steps", str(options.steps)),
            ("recipe.seed", str(seed)),
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
    return Trained(
        job=file.stem,
        method=method,
        seed=seed,
        communication=communication,
        value=value,
        curve=curve,
        step_seconds=statistics.median(step["step_seconds"] for step in steps),
    )


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def by_training(found: Sequence[Trained]) -> list[Mapping[str, Sequence[Trained]]]:
    """The rows of each job and number of steps, by method."""
    trainings: dict[tuple[str, int], dict[str, list[Trained]]] = {}
    for each in found:
        trainings.setdefault((each.job, each.steps), {}).setdefault(each.method, []).append(each)
    order = list(METHODS)
    return [dict(sorted(rows.items(), key=lambda row: order.index(row[0]))) for rows in trainings.values()]


def cells(rows: Mapping[str, Sequence[Trained]], method: str, words: Mapping[str, str]) -> list[str]:
    """Bytes, how many times fewer, the last value over the seeds, and whether its mean is within plain's."""
    mine, plain = rows[method], rows.get(PLAIN)
    sent = statistics.mean(each.sent for each in mine)
    last = [each.reached for each in mine]
    fewer, within = "", ""
    if plain is not None:
        fewer = f"{statistics.mean(each.sent for each in plain) / sent:.1f}"
        if len(plain) > 1:
            theirs = [each.reached for each in plain]
            good = _better(mine[0].value)
            enough = good(statistics.mean(last), max(theirs) if good is _less else min(theirs))
            within = words["yes" if enough else "no"]
    shown = f"{statistics.mean(last):.3f} ({min(last):.3f}-{max(last):.3f})"
    return [f"{sent / 1e6:.1f}", fewer, shown, within]


def _less(value: float, limit: float) -> bool:
    return value <= limit


def _more(value: float, limit: float) -> bool:
    return value >= limit


def _better(value: str) -> Callable[[float, float], bool]:
    """How a value compares with the worst that plain data parallelism has: accuracies are to be high, losses low."""
    return _more if value == "accuracy" else _less


def show(rows: Mapping[str, Sequence[Trained]]) -> None:
    plain, *_ = rows.values()
    first = plain[0]
    seeds = ", ".join(str(each.seed) for each in plain)
    table = Table(title=f"{first.job}: {first.steps} steps, seeds {seeds}")
    for name in WORDS["en"]["heads"].format(value=first.value).replace("`", "").split(" | "):
        table.add_column(name, justify="right")
    table.add_column("ms a step", justify="right")
    for method in rows:
        milliseconds = f"{1e3 * statistics.median(each.step_seconds for each in rows[method]):.0f}"
        table.add_row(method, *cells(rows, method, WORDS["en"]), milliseconds)
    Console().print(table)


def write_docs(trainings: Sequence[Mapping[str, Sequence[Trained]]]) -> None:
    for language, page in PAGES.items():
        parts = [section(rows, language) for rows in trainings]
        text = "\n\n".join(parts)
        before = page.read_text(encoding="utf-8")
        page.write_text(MARKS.sub(lambda marks, text=text: f"{marks[1]}\n{text}\n\n{marks[2]}", before), "utf-8")
    for rows in trainings:
        (DOCS / "pictures" / picture_name(rows)).write_text(picture(rows), encoding="utf-8")


def section(rows: Mapping[str, Sequence[Trained]], language: str) -> str:
    """A title, a table and a picture in Markdown."""
    words = WORDS[language]
    (first, *others), *_ = rows.values()
    named = {"job": first.job, "steps": f"{first.steps:,}", "seeds": 1 + len(others)}
    value = words[first.value]
    heads = words["heads"].format(value=value)
    lines = [f"| {heads} |", "| --- | ---: | ---: | ---: | --- |"]
    lines += [f"| {' | '.join([f'`{method}`', *cells(rows, method, words)])} |" for method in rows]
    folder = "pictures" if language == "en" else "../pictures"
    shown = words["picture"].format(value=value, file=f"{folder}/{picture_name(rows)}")
    return "\n\n".join([words["title" if others else "one"].format(**named), "\n".join(lines), shown])


def picture_name(rows: Mapping[str, Sequence[Trained]]) -> str:
    (first, *_), *_ = rows.values()
    return f"compression-{first.job}-{first.steps}.svg"


def picture(rows: Mapping[str, Sequence[Trained]]) -> str:
    """The means over the seeds of each method, over bytes and over seconds."""
    (first, *_), *_ = rows.values()
    curves: dict[int, list[Curve]] = {1: [], 2: []}
    for number, (method, trained) in enumerate(rows.items()):
        points = [
            tuple(statistics.mean(column) for column in zip(*same, strict=True))
            for same in zip(*(each.curve for each in trained), strict=True)
        ]
        for place, mine in curves.items():
            shown = [(point[place] / (1e6 if place == 2 else 1), point[3]) for point in points]
            mine.append(Curve(name=method, colour=number % len(COLOURS), dash=0, points=shown))
    title = f"{first.job}, {first.steps} steps: {first.value}"
    linear = Scale(base=None)
    return svg(
        title,
        [
            Panel(title=f"{title} over MB sent", curves=curves[2], across=Scale(base=10), up=linear),
            Panel(title=f"{title} over seconds of steps", curves=curves[1], across=linear, up=linear),
        ],
    )


if __name__ == "__main__":
    main()
