"""The tables of docs/compare.md that hold steps in turns against each other, from what turns.py has written.

    python benchmarks/turns.py examples/reviews.yaml --json build/turns/reviews-2.json
    python benchmarks/turns_tables.py build/turns/*.json [--docs]

A table for each number of hosts and processes, a column for each job and precision, a row for each way. The starts of
files that measured one way of one column are put together. `--docs` writes them into docs/compare.md and
docs/zh/compare.md. Tables and columns that the page has and no file measured stay as they are.
"""

import argparse
import json
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

from page_parts import markdown_table, read_part, write_parts

from benchmarks.turns import BASE
from benchmarks.ways import WAYS

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"en": ROOT / "docs" / "compare.md", "zh": ROOT / "docs" / "zh" / "compare.md"}
PART = "benchmarks/turns_tables.py"  # of the pages, by its mark
CHINESE = {
    "hand-written, no messages": "手写，不通信",
    "hand-written DDP": "手写 DDP",
    " over gloo": "，走 gloo",
    "reviews": "评论",
    "language": "语言模型",
    ", ": "，",
}

Row = Mapping[str, Any]


# A table of a page: by column and way, both as the page calls them, what stands there.
Columns = dict[str, dict[str, str]]


class Ranks(NamedTuple):
    """Where the ranks of a measurement were."""

    hosts: int
    processes: int  # of each host
    rate: str | None  # of a host's link


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", help="JSON files of turns.py")
    parser.add_argument("--docs", action="store_true", help="write the tables into the docs")
    options = parser.parse_args()
    measured = joined([row for file in options.files for row in json.loads(file.read_text(encoding="utf-8"))])
    if not options.docs:
        print(text_of(tables(measured, "en"), "en"))
        return
    for language in PAGES:
        page = PAGES[language]
        write_parts(page, {PART: updated(read_part(page, PART), tables(measured, language), language)})


def updated(text: str, measured: Mapping[str, Columns], language: str) -> str:
    """The tables of a page with these columns in place of the same ones, or behind those that it has."""
    found = read(text)
    for title, columns in measured.items():
        found[title] = {**found.get(title, {}), **columns}
    return text_of(found, language)


def read(text: str) -> dict[str, Columns]:
    """By title, the tables in a text that `text_of` has written."""
    found: dict[str, Columns] = {}
    for title, table in re.findall(r"^([^|\n]+)\n\n((?:\|.*(?:\n|$))+)", text, re.MULTILINE):
        head, _, *rows = ([cell.strip() for cell in line[1:-1].split("|")] for line in table.splitlines())
        columns = found[title] = {name: {} for name in head[1:]}
        for way, *cells in rows:
            for column, cell in zip(columns.values(), cells, strict=True):
                column[way] = cell
    return found


def joined(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows of each column, of which each has the starts of all files."""
    columns: dict[tuple[Any, ...], dict[str, list[Row]]] = {}
    for row in rows:
        column = tuple(row[name] for name in ("job", "precision", "hosts", "processes", "rate"))
        columns.setdefault(column, {}).setdefault(row["way"], []).append(row)
    return [[_of_all_starts(same) for same in ways.values()] for ways in columns.values()]


def _of_all_starts(rows: Sequence[Row]) -> Row:
    ratios = [ratio for row in rows for ratio in row["ratios"]]
    seconds = [each for row in rows for each in row["seconds"]]
    return {
        **rows[0],
        "starts": len(seconds),
        "ratios": ratios,
        "ratio": statistics.median(ratios),
        "seconds": seconds,
        "seconds_median": statistics.median(seconds),
    }


def tables(measured: Sequence[Sequence[Row]], language: str) -> dict[str, Columns]:
    """By title, the table of each kind of place: a column for each job and precision."""
    places: dict[str, Columns] = {}
    for rows in measured:
        first = rows[0]
        ranks = Ranks(hosts=first["hosts"], processes=first["processes"], rate=first["rate"])
        column = {words(WAYS[row["way"]].title, language): cell(row) for row in rows}
        places.setdefault(title(ranks, language), {})[words(f"{first['job']}, {first['precision']}", language)] = (
            column
        )
    return places


def text_of(places: Mapping[str, Columns], language: str) -> str:
    """Markdown: titles and tables."""
    return "\n\n".join(f"{title}\n\n{table(columns, language)}" for title, columns in places.items())


def title(ranks: Ranks, language: str) -> str:
    if ranks.hosts == 1:
        return {"en": f"{ranks.processes} processes on a host:", "zh": f"一台主机上 {ranks.processes} 个进程："}[
            language
        ]
    rate = ranks.rate or "no limit"
    return {
        "en": f"{ranks.hosts} hosts of {ranks.processes} processes each, links of {rate}:",
        "zh": f"{ranks.hosts} 台主机，每台 {ranks.processes} 个进程，链路 {rate}：",
    }[language]


def table(columns: Columns, language: str) -> str:
    """A row for each way that any column has."""
    lines: list[Sequence[str]] = []
    for way in (words(each.title, language) for each in WAYS.values()):
        cells = [column.get(way, "") for column in columns.values()]
        if any(cells):
            lines.append([way, *cells])
    return markdown_table(["way" if language == "en" else "方式", *columns], lines, align="l")


def cell(row: Row) -> str:
    if row["way"] == BASE:
        return f"1.00: {1e3 * row['seconds_median']:.0f} ms"
    return f"{row['ratio']:.2f} ({min(row['ratios']):.2f}-{max(row['ratios']):.2f})"


def words(text: str, language: str) -> str:
    for english, chinese in CHINESE.items() if language == "zh" else ():
        text = text.replace(english, chinese)
    return text


if __name__ == "__main__":
    main()
