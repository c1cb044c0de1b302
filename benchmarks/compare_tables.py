"""The tables of docs/compare.md that compare whole trainings, from what `samestep compare` has written.

    samestep compare examples/reviews.yaml --steps 60 --repeats 3 --methods "..." --json build/compare/short.json
    python benchmarks/compare_tables.py short build/compare/short.json --docs

The page has the command of each table above it: `short`, `whole` and `keras` are of `samestep compare`, `peers` is of
benchmarks/peers/compare.py. `--docs` keeps the figures in benchmarks/measured and writes the table into
docs/compare.md and docs/zh/compare.md. Methods that were not measured have no row.
"""

import argparse
import datetime
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

from page_parts import MeasuredTable, markdown_table

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Which columns a table has."""

    base: str | None = None  # the method whose time is 1; None: no such column
    of_medians: bool = False  # the ratio of the medians, else the median of the repeats' ratios
    megabytes: str | None = None  # "sent": by a rank in a step; "all": memory of all ranks


KINDS: Mapping[str, Kind] = {
    "short": Kind(base="dp2", megabytes="sent"),
    "whole": Kind(),
    "keras": Kind(base="single", megabytes="all"),
    "peers": Kind(base="dp2", of_medians=True),
}
WORDS: Mapping[str, Mapping[str, str]] = {
    "en": {
        "method": "method",
        "seconds": "seconds",
        "spread": "seconds (least to most)",
        "ratio": "times `{}`",
        "sent": "MB sent",
        "all": "MB of all",
        "accuracy": "accuracy",
        "difference": "first losses versus one process",
        "none": "asynchronous",
    },
    "zh": {
        "method": "方法",
        "seconds": "秒",
        "spread": "秒（最少至最多）",
        "ratio": "是 `{}` 的几倍",
        "sent": "发送 MB",
        "all": "全部 MB",
        "accuracy": "准确率",
        "difference": "头几步损失与单进程之差",
        "none": "异步",
    },
}
FORMATS = {"sent": "{:,.2f}", "all": "{:,.0f}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=KINDS)
    parser.add_argument("file", type=Path, help="JSON file of the comparison")
    parser.add_argument("--docs", action="store_true", help="write the table into the docs")
    options = parser.parse_args()
    compared = json.loads(options.file.read_text(encoding="utf-8"))
    rows = rows_of(compared, KINDS[options.table])
    print(markdown(rows, "en", kind=KINDS[options.table]))
    if options.docs:
        measured = datetime.datetime.fromtimestamp(options.file.stat().st_mtime, tz=datetime.UTC)
        TABLES[options.table].keep(rows, date=measured.date().isoformat())


def rows_of(compared: Mapping[str, Any], kind: Kind) -> list[dict[str, Any]]:
    """The figures of each method that was measured. Of a table with ratios each repeat has the base's."""
    measured = {row["method"]: row for row in compared["rows"] if row["status"] == "measured"}
    rows = []
    for name, row in measured.items():
        seconds = [run["seconds"] for run in row["repeats"]]
        found: dict[str, Any] = {"method": name, "seconds": [statistics.median(seconds), min(seconds), max(seconds)]}
        if kind.base is not None:
            base = [run["seconds"] for run in measured[kind.base]["repeats"]]
            found["ratio"] = (
                statistics.median(seconds) / statistics.median(base)
                if kind.of_medians
                else statistics.median(mine / theirs for mine, theirs in zip(seconds, base, strict=True))
            )
        if kind.megabytes is not None:
            found["megabytes"] = row["sent_bytes" if kind.megabytes == "sent" else "all_memory_bytes"] / 1e6
        held = row["same_step"]
        found |= {"accuracy": row["metric"], "difference": held["difference"] if held else None}
        rows.append({**found, "precision": held["precision"] if held else None})
    return rows


def markdown(rows: Sequence[Row], language: str, *, kind: Kind) -> str:
    words = WORDS[language]
    titles = [words["method"], words["seconds" if kind.base is None else "spread"]]
    if kind.base is not None:
        titles.append(words["ratio"].format(kind.base))
    if kind.megabytes is not None:
        titles.append(words[kind.megabytes])
    titles += [words["accuracy"], words["difference"]]
    return markdown_table(titles, [cells(row, kind, words) for row in rows], align="l")


def cells(row: Row, kind: Kind, words: Mapping[str, str]) -> list[str]:
    middle, least, most = (f"{each:.1f}" for each in row["seconds"])
    found = [f"`{row['method']}`", middle if kind.base is None else f"{middle} ({least}-{most})"]
    if kind.base is not None:
        found.append(f"{row['ratio']:.2f}")
    if kind.megabytes is not None:
        found.append(FORMATS[kind.megabytes].format(row["megabytes"]))
    known = row["difference"] is not None
    beside = f"{row['difference']:.0e} ({row['precision']})" if known else words["none"]
    return [*found, f"{100 * row['accuracy']:.2f} %", beside]


TABLES: Mapping[str, MeasuredTable] = {
    name: MeasuredTable(
        name=f"compare-{name}",
        part=f"benchmarks/compare_tables.py {name}",
        page="docs/compare.md",
        text=partial(markdown, kind=kind),
    )
    for name, kind in KINDS.items()
}


if __name__ == "__main__":
    main()
