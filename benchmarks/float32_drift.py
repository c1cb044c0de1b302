"""How far trainings in float32 move apart by rounding alone: `examples/reviews.yaml` alone, on one thread, and split.

    python benchmarks/float32_drift.py [--docs]

Trains the job to its end, with `single` on two threads and on one, and with `dp2`; some minutes on 2 cores. `--docs`
writes the table of docs/promise.md and docs/zh/promise.md.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

from page_parts import ROOT, MeasuredTable, markdown_table

from samestep import jobfile
from samestep.api import train_job
from samestep.comparison.results import losses
from samestep.run_folder import REPORT_FILE

JOB = ROOT / "examples" / "reviews.yaml"
# The first is what the others are compared with.
TRAININGS = (("single", 2), ("single", 1), ("dp2", 1))
LATER = 100  # a step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docs", action="store_true", help="write the table into the docs")
    options = parser.parse_args()
    rows = measured()
    print(markdown(rows, "en"))
    if options.docs:
        TABLE.keep(rows)


def measured() -> list[dict[str, Any]]:
    """Train under each layout; for each the correct predictions, and how far its losses are from the first one's."""
    rows: list[dict[str, Any]] = []
    reference: Sequence[float] = ()
    for layout, threads in TRAININGS:
        found, confusion = _train(layout, threads)
        reference = reference or found
        apart = [abs(mine - known) / abs(known) for mine, known in zip(found, reference, strict=True)]
        rows.append(
            {
                "layout": layout,
                "threads": threads,
                "steps": len(found),
                "correct": sum(row[number] for number, row in enumerate(confusion)),
                "held_out": sum(map(sum, confusion)),
                "first": apart[0],
                "later": apart[LATER],
                "most": max(apart),
            }
        )
    return rows


def _train(layout: str, threads: int) -> tuple[list[float], list[list[int]]]:
    """The loss of each step, and at the end the held-out samples of each class (row) by predicted class (column)."""
    job = jobfile.load(JOB).job
    with TemporaryDirectory(prefix="samestep-drift-") as place:
        folder = Path(place) / "run"
        run = replace(job.run, layout=layout, threads=threads, folder=folder, device="cpu", log=())
        train_job(replace(job, run=run))
        report = json.loads((folder / REPORT_FILE).read_text(encoding="utf-8"))
        return losses(folder), list(report["metrics"]["confusion_matrix"].values())


_TITLES = {
    "en": ("layout", "threads a rank", "first step", f"step {LATER}", "at most", "correct"),
    "zh": ("布局", "每个 rank 的线程", "第一步", f"第 {LATER} 步", "最多", "正确"),
}
_OF = {"en": "{correct:,} of {held_out:,}", "zh": "{held_out:,} 条中 {correct:,} 条"}


def markdown(rows: Sequence[dict[str, Any]], language: str) -> str:
    """The table: relative differences of the loss from those of the first row."""
    shown = [
        [
            f"`{row['layout']}`",
            str(row["threads"]),
            *("" if row is rows[0] else f"{row[key]:.1e}" for key in ("first", "later", "most")),
            _OF[language].format(**row),
        ]
        for row in rows
    ]
    return markdown_table(_TITLES[language], shown)


TABLE = MeasuredTable(name="float32-drift", part="benchmarks/float32_drift.py", page="docs/promise.md", text=markdown)

if __name__ == "__main__":
    main()
