"""Trains one job in one process and in two, and puts the losses and the score side by side, as they were written.

    python benchmarks/side_by_side.py [--docs]

Each training is a `samestep train` of its own, in float32, with the defaults: sums over two processes are rounded
otherwise than in one. `--docs` writes the table of README.md and README.zh-CN.md.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from page_parts import MeasuredTable, markdown_table  # noqa: E402

from benchmarks.shipped import train_example  # noqa: E402

JOB, METRIC = "digits", "accuracy"
LAYOUTS = ("single", "dp2", "fsdp2", "pp2")
STEPS = (1, 2, 10, 100, 460)  # the last one is the job's last
HEADS = {
    "en": ("loss of the step", "one process", *(f"two: `{layout}`" for layout in LAYOUTS[1:])),
    "zh": ("第几步的损失", "单进程", *(f"两个进程：`{layout}`" for layout in LAYOUTS[1:])),
}
SCORE = {"en": "accuracy on held-out digits", "zh": "留出数字上的准确率"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docs", action="store_true", help="write the table into the READMEs")
    options = parser.parse_args()
    rows = [trained(layout) for layout in LAYOUTS]
    print(markdown(rows, "en"))
    if options.docs:
        TABLE.keep(rows)


def trained(layout: str) -> Mapping[str, Any]:
    """The losses of some steps of a training in a folder of its own, and its score."""
    with TemporaryDirectory(prefix="samestep-side-by-side-") as folder:
        run = Path(folder) / "run"
        train_example(JOB, run, ["--layout", layout, "--set", "run.threads=1"])
        lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        report = json.loads((run / "report.json").read_text(encoding="utf-8"))
    losses = {str(step): json.loads(lines[step - 1])["loss"] for step in STEPS}
    return {"layout": layout, "losses": losses, "score": report["metrics"][METRIC]}


def markdown(rows: Sequence[Mapping[str, Any]], language: str) -> str:
    """A row for each step and one for the score, a column for each layout."""
    lines = [[str(step), *(f"{row['losses'][str(step)]:.6f}" for row in rows)] for step in STEPS]
    lines.append([SCORE[language], *(f"{row['score']:.2%}".replace("%", " %") for row in rows)])
    return markdown_table(HEADS[language], lines)


TABLE = MeasuredTable(name="side-by-side", part="benchmarks/side_by_side.py", page="README.md", text=markdown)


if __name__ == "__main__":
    main()
