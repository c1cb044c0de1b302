"""Compares a plan with the measurements of `samestep compare`: BERT-base on this machine, and whether orders agree.

    samestep plan benchmarks/bert_base.yaml --measure 3 --json plan.json
    samestep compare benchmarks/bert_base.yaml --methods "native:single, native:dp2" --repeats 1 --json compare.json
    python benchmarks/plan_compare.py plan.json compare.json [...]     # the table of docs/planning.md

The methods may be compared in several runs, each with its own file.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

from page_parts import markdown_table, write_parts

from samestep.planning.published import kendall_tau

ROOT = Path(__file__).resolve().parent.parent
PAGES = {"en": ROOT / "docs" / "planning.md", "zh": ROOT / "docs" / "zh" / "planning.md"}
HEADS: Mapping[str, Sequence[str]] = {
    "en": ("layout", "planned, s", "place", "measured, s", "place", "error"),
    "zh": ("布局", "规划（秒）", "名次", "实测（秒）", "名次", "误差"),
}
SUMMARY = {
    "en": "Kendall's tau {tau:.2f}; the best by plan, `{best}`, takes {times:.2f} times as long as the "
    "fastest measured, `{fastest}`. "
    "Mean error {mean:.0%}, largest {largest:.0%}. Layouts marked * corrected the rates.",
    "zh": "Kendall tau 为 {tau:.2f}；规划的最佳布局 `{best}` 的步时是实测最快的 `{fastest}` 的 {times:.2f} 倍。"
    "平均误差 {mean:.0%}，最大 {largest:.0%}。带 * 的布局用来修正了速率。",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path)
    parser.add_argument("compared", type=Path, nargs="+")
    options = parser.parse_args()
    plan = json.loads(options.plan.read_text("utf-8"))
    planned = {each["layout"]: each["step_seconds"] for each in plan["layouts"]}
    measured = step_seconds([json.loads(file.read_text("utf-8")) for file in options.compared])
    rows = {layout: (planned[layout], measured[layout]) for layout in planned if layout in measured}
    corrected = {each["layout"] for each in plan["measured"]}
    for language, page in PAGES.items():
        told = f"{table(rows, corrected, HEADS[language])}\n\n{summary(rows, SUMMARY[language])}"
        print(told)
        write_parts(page, {"compared": told})


def step_seconds(compared: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The median step of each layout, over its repeats."""
    found: dict[str, float] = {}
    for row in (row for each in compared for row in each["rows"]):
        if row["engine"] == "native" and row["status"] == "measured":
            found[row["layout"]] = median(run["step_seconds"] for run in row["repeats"])
    return found


def table(rows: Mapping[str, tuple[float, float]], corrected: set[str], heads: Sequence[str]) -> str:
    lines: list[Sequence[str]] = []
    places = [sorted(rows, key=lambda layout, at=at: rows[layout][at]) for at in (0, 1)]
    for layout in places[0]:
        planned, measured = rows[layout]
        lines.append(
            [
                f"`{layout}`{' *' if layout in corrected else ''}",
                f"{planned:.3f}", str(places[0].index(layout) + 1),
                f"{measured:.3f}", str(places[1].index(layout) + 1),
                f"{planned / measured - 1:+.0%}",
            ]
        )  # fmt: skip
    return markdown_table(heads, lines)


def summary(rows: Mapping[str, tuple[float, float]], text: str) -> str:
    planned, measured = ([row[at] for row in rows.values()] for at in (0, 1))
    best, fastest = (min(rows, key=lambda layout, at=at: rows[layout][at]) for at in (0, 1))
    errors = [abs(one / other - 1) for one, other in rows.values()]
    return text.format(
        tau=kendall_tau(planned, measured),
        best=best,
        fastest=fastest,
        times=rows[best][1] / rows[fastest][1],
        mean=sum(errors) / len(errors),
        largest=max(errors),
    )


if __name__ == "__main__":
    main()
