"""Collectives that each backend supports, and their times by transport: the tables of docs/communication.md.

    python benchmarks/communication.py [--processes 2,4] [--sizes 1KiB,64KiB,1MiB,25MiB,100MiB] [--docs]

Runs `samestep comm` with each number of processes, and `samestep comm support`, and prints their tables as Markdown:
all collectives for the first number of processes, and for the others those that shared memory replaces gloo in.
`--docs` writes them into docs/communication.md and docs/zh/communication.md.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

from page_parts import markdown_table, write_parts

from samestep.comm.correctness import DTYPES, short
from samestep.comm_bench.display import dtype_in_short, rate_in_words, seconds_in_words
from samestep.sizes import binary_size

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
BYTES = Words("bytes", "字节")
FASTER = Words("times as fast as {}", "是 {} 的几倍快")
BUS = Words("bus bandwidth, GB/s", "总线带宽，GB/s")
COPY = Words("memory copy, GB/s", "内存拷贝，GB/s")
RANKS = Words("{} ranks:", "{} 个 rank：")
TAKEN_OVER = "all-reduce,reduce,reduce-scatter,all-gather,broadcast,barrier"  # where shared memory replaces gloo
FITS = (
    COLLECTIVE,
    TRANSPORT,
    Words("latency", "延迟"),
    Words("bandwidth, GB/s", "带宽，GB/s"),
    Words("farthest median from it", "偏离最大的中位数"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", default="2,4", help="numbers of ranks, by commas")
    parser.add_argument("--sizes", default="1KiB,64KiB,1MiB,25MiB,100MiB")
    parser.add_argument("--docs", action="store_true")
    options = parser.parse_args()
    found = command("support")
    first, *others = options.processes.split(",")
    measured = [command("--processes", first, "--sizes", options.sizes)]
    some = ["--sizes", options.sizes, "--collectives", TAKEN_OVER]
    measured += [command("--processes", each, *some) for each in others]
    for number, (language, page) in enumerate(PAGES.items()):
        times = [f"{RANKS[number].format(each['ranks'])}\n\n{times_table(each, number)}" for each in measured]
        parts = [support_table(found, number), "\n\n".join(times), fits_table(measured[0], number)]
        if options.docs:
            write_parts(page, {f"part {place}": part for place, part in enumerate(parts, 1)})
        elif language == "en":
            print("\n\n".join(parts))


def command(*words: str) -> Mapping[str, Any]:
    """Run `samestep comm` and return its JSON."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        program = [sys.executable, "-m", "samestep", "comm", *words, "--json", str(file)]
        subprocess.run(program, check=True, stdout=subprocess.DEVNULL)
        return json.loads(file.read_text(encoding="utf-8"))


def support_table(found: Mapping[str, Any], language: int) -> str:
    """The support table: a row per transport, device and collective, a column per dtype."""
    names = [short(dtype) for dtype in DTYPES]
    titles = [f"{TRANSPORT[language]}", COLLECTIVE[language], *map(dtype_in_short, names)]
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for each in found["attempts"]:
        if each["collective"] != GROUP:
            key = (f"{each['transport']}, {each['device']}", each["collective"])
            cells.setdefault(key, {})[each["dtype"]] = WORKS[each["verdict"]][language]
    return markdown_table(
        titles, [[*key, *(row.get(name, "") for name in names)] for key, row in cells.items()], align="llr"
    )


def times_table(measured: Mapping[str, Any], language: int) -> str:
    """The table of times: a row per collective and size, and per transport the median (10th and 90th percentile)."""
    first, *others = measured["transports"]
    sizes: dict[tuple[str, int], dict[str, Mapping[str, Any]]] = {}
    for row in measured["rows"]:
        sizes.setdefault((row["collective"], row["bytes"]), {})[row["transport"]] = row
    titles = [COLLECTIVE[language], BYTES[language], first]
    for other in others:
        titles += [other, FASTER[language].format(first)]
    lines = []
    for (collective, size), by_transport in sizes.items():
        base = by_transport[first]
        line = [collective, binary_size(size) if size else "", spread(base)]
        for other in others:
            row = by_transport.get(other)
            faster = f"{base['seconds_median'] / row['seconds_median']:.1f}" if row else ""
            line += [spread(row) if row else "", faster]
        best = min(by_transport.values(), key=lambda row: row["seconds_median"])
        lines.append([*line, rate_in_words(best["bus_bandwidth"]), rate_in_words(base["limit"])])
    return markdown_table([*titles, BUS[language], COPY[language]], lines)


def spread(row: Mapping[str, Any]) -> str:
    least, most = seconds_in_words(row["seconds_p10"]), seconds_in_words(row["seconds_p90"])
    return f"{seconds_in_words(row['seconds_median'])} ({least} - {most})"


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
    return markdown_table([title[language] for title in FITS], rows, align="llr")


if __name__ == "__main__":
    main()
