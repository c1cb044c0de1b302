"""Trains the jobs that docs/what-works.md lists: the score on held-out samples, and the seconds of all steps.

    python benchmarks/shipped.py [--jobs reviews digits] [--docs]

Each job is trained once, by `samestep train` with its own layout of two ranks; examples/graph.yaml a second time
without edges. The first lines of a job file say what its data needs. `--docs` writes the table of docs/what-works.md
and docs/zh/what-works.md, in which the rows of other jobs stay, each with the day on which it was measured.
"""

import argparse
import datetime
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

from page_parts import MeasuredTable, markdown_table

ROOT = Path(__file__).resolve().parents[1]
TIME_LIMIT = 1800.0  # seconds of a training


@dataclass(frozen=True, kw_only=True)
class Shipped:
    """A row of the table: what the job is, in both languages, and which score is shown."""

    title: Mapping[str, str]
    model: Mapping[str, str]
    metric: str
    score: Mapping[str, str]  # with {score}, and {beside} of a second training
    beside: Sequence[str] = ()  # that training's further words on the command line


NET = {"en": "small convolutional net", "zh": "小卷积网络"}
ACCURACY = {"en": "accuracy {score:.1%}", "zh": "准确率 {score:.1%}"}
JOBS: Mapping[str, Shipped] = {
    "reviews": Shipped(
        title={"en": "Chinese reviews in six classes", "zh": "中文评论，六类"},
        model={"en": "BERT, 2 layers of 128", "zh": "BERT，2 层，宽 128"},
        metric="accuracy",
        score={"en": "accuracy {score:.0%} (largest class: 25 %)", "zh": "准确率 {score:.0%}（最大的一类占 25 %）"},
    ),
    "language": Shipped(
        title={"en": "the next token of Shakespeare's works", "zh": "莎士比亚作品的下一个 token"},
        model={"en": "Llama of 1.3 million parameters", "zh": "130 万参数的 Llama"},
        metric="perplexity",
        score={
            "en": "perplexity {score:.1f} "
            "([frequencies of tokens: 464, of pairs: 70.4](../benchmarks/language_baselines.py))",
            "zh": "困惑度 {score:.1f}"
            "（[只凭 token 频率：464，凭 token 对的频率：70.4](../../benchmarks/language_baselines.py)）",
        },
    ),
    "fashion": Shipped(
        title={"en": "Fashion-MNIST, ten classes", "zh": "Fashion-MNIST，十类"},
        model=NET,
        metric="accuracy",
        score=ACCURACY,
    ),
    "digits": Shipped(
        title={"en": "handwritten digits of scikit-learn", "zh": "scikit-learn 的手写数字"},
        model=NET,
        metric="accuracy",
        score=ACCURACY,
    ),
    "experts": Shipped(
        title={"en": "the same Chinese reviews, under `ep2`", "zh": "同样的中文评论，用 `ep2`"},
        model={
            "en": "2 layers of 8 experts, 2 for each token ([its code](../examples/experts.py))",
            "zh": "2 层，各 8 个专家，每个 token 用 2 个（[代码](../../examples/experts.py)）",
        },
        metric="accuracy",
        score=ACCURACY,
    ),
    "graph": Shipped(
        title={
            "en": "synthetic graphs in three classes that differ only in their edges",
            "zh": "造出来的图，三类，只有边不同",
        },
        model={
            "en": "a graph net of 2 layers ([its code](../examples/graph.py))",
            "zh": "2 层的图网络（[代码](../../examples/graph.py)）",
        },
        metric="accuracy",
        score={
            "en": "accuracy {score:.1%} (without edges: {beside:.1%})",
            "zh": "准确率 {score:.1%}（不看边：{beside:.1%}）",
        },
        beside=("--set", "recipe.args.edges=false"),
    ),
}
TITLES: Mapping[str, Sequence[str]] = {
    "en": ("job", "model", "on held-out samples", "steps took", "measured on"),
    "zh": ("作业文件", "模型", "留出样本上的结果", "各步用时", "测量日期"),
}
SECONDS = {"en": ("{:.0f} s", "{:.0f} s, on shared cores"), "zh": ("{:.0f} 秒", "{:.0f} 秒，与别的程序分核")}
COLON = {"en": ": ", "zh": "："}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--set", action="append", default=[], help="key=value, laid over every job")
    parser.add_argument("--docs", action="store_true", help="write the table into the docs")
    options = parser.parse_args()
    more = [word for each in options.set for word in ("--set", each)]
    rows = []
    for name in options.jobs:
        rows.append(measured(name, more))
        print(rows[-1], flush=True)
    if options.docs:
        TABLE.keep(merged(TABLE.kept(), rows))


def measured(name: str, more: Sequence[str]) -> dict[str, Any]:
    """Train a job, and a second time where its row has another score beside the first."""
    shipped = JOBS[name]
    report = trained(name, more)
    row = {
        "job": name,
        "score": report["metrics"][shipped.metric],
        "seconds": report["seconds"],
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
    }
    if shipped.beside:
        row["beside"] = trained(name, [*shipped.beside, *more])["metrics"][shipped.metric]
    return row


def trained(name: str, more: Sequence[str]) -> Mapping[str, Any]:
    """The report of a training in a folder of its own."""
    with TemporaryDirectory(prefix="samestep-shipped-") as folder:
        train_example(name, Path(folder) / "run", more)
        return json.loads((Path(folder) / "run" / "report.json").read_text(encoding="utf-8"))


def train_example(name: str, run: Path, more: Sequence[str]) -> None:
    """Train a job of examples/ into a folder, in its own process. Raises SystemExit with the end of its errors."""
    command = [sys.executable, "-m", "samestep", "train", str(ROOT / "examples" / f"{name}.yaml")]
    done = subprocess.run(
        [*command, "--set", f"run.folder={run}", *more],
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{name}: {done.stderr[-2000:]}")


def merged(known: Sequence[Mapping[str, Any]], found: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The known rows with those of `found` in their place, in the order of `JOBS`."""
    rows = {row["job"]: row for row in (*known, *found)}
    return [rows[name] for name in JOBS if name in rows]


def markdown(rows: Sequence[Mapping[str, Any]], language: str) -> str:
    lines = []
    for row in rows:
        shipped = JOBS[row["job"]]
        seconds = SECONDS[language]["other_load" in row].format(row["seconds"])
        score = shipped.score[language].format(**row).replace("%", " %").replace("  %", " %")
        title = f"`examples/{row['job']}.yaml`{COLON[language]}{shipped.title[language]}"
        lines.append([title, shipped.model[language], score, seconds, row["date"]])
    return markdown_table(TITLES[language], lines, align="l")


TABLE = MeasuredTable(
    name="shipped", part="benchmarks/shipped.py", page="docs/what-works.md", text=markdown, dated_rows=True
)


if __name__ == "__main__":
    main()
