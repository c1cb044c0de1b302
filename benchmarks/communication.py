"""What a back end has, and what collectives take through each transport: the tables of docs/communication.md.

    python benchmarks/communication.py [--processes 2] [--sizes 1KB,64KB,1MB,16MB] [--docs]

Runs `samestep comm` and `samestep comm support` and prints their tables as Markdown. `--docs` writes them into
docs/communication.md and docs/zh/communication.md.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from samestep.comm.correctness import DTYPES, short
from samestep.comm_bench.request import size_in_words
from samestep.comm_bench.table import dtype_in_short, rate_in_words, seconds_in_words

ROOT = Path(__file__).parent.parent
PAGES = {"en": ROOT / "docs" / "communication.md", "zh": ROOT / "docs" / "zh" / "communication.md"}
GROUP = "(process group)"


class Words(NamedTuple):
    """A title in both languages."""

    en: str
    zh: str


WORKS = {
    "works": Words("yes", "可用"),
    "refused": Words("refused", "拒绝"),
    "wrong": Words("wrong", "结果错"),
    "hangs": Words("hangs", "卡住"),
    "crashes": Words("crashes", "崩溃"),
}
COLLECTIVE, TRANSPORT = Words("collective", "集合通信"), Words("transport", "通道")
TIMES = (
    COLLECTIVE,
    Words("bytes", "字节"),
    TRANSPORT,
    Words("median", "中位数"),
    Words("10 % - 90 %", "10 % - 90 %"),
    Words("bus bandwidth, GB/s", "总线带宽，GB/s"),
    Words("memory copy, GB/s", "内存拷贝，GB/s"),
)
FITS = (
    COLLECTIVE,
    TRANSPORT,
    Words("latency", "延迟"),
    Words("bandwidth, GB/s", "带宽，GB/s"),
    Words("farthest median from it", "偏离最大的中位数"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--sizes", default="1KB,64KB,1MB,16MB")
    parser.add_argument("--docs", action="store_true")
    options = parser.parse_args()
    found = command("support")
    measured = command("--processes", str(options.processes), "--sizes", options.sizes)
    for number, (language, page) in enumerate(PAGES.items()):
        parts = [support_table(found, number), times_table(measured, number), fits_table(measured, number)]
        if options.docs:
            write_between_markers(page, *parts)
        elif language == "en":
            print("\n\n".join(parts))


def command(*words: str) -> Mapping[str, Any]:
    """What `samestep comm` writes for programs."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        program = [sys.executable, "-m", "samestep", "comm", *words, "--json", str(file)]
        subprocess.run(program, check=True, stdout=subprocess.DEVNULL)
        return json.loads(file.read_text(encoding="utf-8"))


def support_table(found: Mapping[str, Any], language: int) -> str:
    """A line for each transport, device and collective, a column for each dtype."""
    names = [short(dtype) for dtype in DTYPES]
    titles = [f"{TRANSPORT[language]}", COLLECTIVE[language], *map(dtype_in_short, names)]
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for each in found["attempts"]:
        if each["collective"] != GROUP:
            key = (f"{each['transport']}, {each['device']}", each["collective"])
            cells.setdefault(key, {})[each["dtype"]] = WORKS[each["verdict"]][language]
    return table(titles, [[*key, *(row.get(name, "") for name in names)] for key, row in cells.items()], left=2)


def times_table(measured: Mapping[str, Any], language: int) -> str:
    rows = [
        [
            row["collective"],
            size_in_words(row["bytes"]) if row["bytes"] else "",
            row["transport"],
            seconds_in_words(row["seconds_median"]),
            f"{seconds_in_words(row['seconds_p10'])} - {seconds_in_words(row['seconds_p90'])}",
            rate_in_words(row["bus_bandwidth"]),
            rate_in_words(row["limit"]),
        ]
        for row in measured["rows"]
    ]
    return table([title[language] for title in TIMES], rows, left=1)


def fits_table(measured: Mapping[str, Any], language: int) -> str:
    rows = [
        [
            fit["collective"],
            fit["transport"],
            seconds_in_words(fit["latency_seconds"]),
            rate_in_words(fit["bytes_per_second"]),
            f"{fit['worst_relative_difference']:.0%}",
        ]
        for fit in measured["fits"]
    ]
    return table([title[language] for title in FITS], rows, left=2)


def table(titles: Sequence[str], rows: Sequence[Sequence[str]], *, left: int) -> str:
    """Markdown, the first columns to the left."""
    lines = [titles, [*["---"] * left, *["---:"] * (len(titles) - left)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write_between_markers(page: Path, *parts: str) -> None:
    text = page.read_text(encoding="utf-8")
    for number, part in enumerate(parts, 1):
        place = re.compile(rf"(<!-- part {number} -->\n).*?(<!-- end -->)", re.DOTALL)
        text = place.sub(lambda match, part=part: f"{match[1]}\n{part}\n\n{match[2]}", text)
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
