"""The tables of docs/communication.md on rows of embeddings and shared replicas, from what replicas.py has written.

    python benchmarks/replicas.py recommender --json build/replicas/recommender.json
    python benchmarks/replicas.py recommender --hosts 2 --rate 1gbit --json build/replicas/recommender-hosts.json
    python benchmarks/replicas.py examples/reviews.yaml --set recipe.data.limit=4000 \\
        --json build/replicas/reviews.json
    python benchmarks/replicas.py examples/reviews.yaml --set recipe.data.limit=4000 --hosts 2 --rate 1gbit \\
        --json build/replicas/reviews-hosts.json
    python benchmarks/replicas_tables.py rows build/replicas/re*.json --docs
    python benchmarks/replicas.py wide --ways dense,shared --json build/replicas/wide.json
    python benchmarks/replicas.py wide --ways dense,shared --memory --json build/replicas/wide-memory.json
    python benchmarks/replicas_tables.py shared build/replicas/wide*.json --docs

Of several files with one job and as many hosts, a cell has the least and the most.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

from page_parts import MeasuredTable, markdown_table

from benchmarks.replicas import speed

File = Mapping[str, Any]  # of replicas.py
HELD = ("parameters", "gradients", "optimizer_state")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("files", type=Path, nargs="+", help="JSON files of replicas.py")
    parser.add_argument("--docs", action="store_true", help="write the table into the docs")
    options = parser.parse_args()
    result = RESULTS[options.table]([json.loads(file.read_text(encoding="utf-8")) for file in options.files])
    print(TABLES[options.table].text(result, "en"))
    if options.docs:
        TABLES[options.table].keep(result)


def rows_of(files: Sequence[File]) -> list[dict[str, Any]]:
    """Of each job the bytes that a step sends, of all rows and of touched ones, and the speed of the latter."""
    rows: dict[str, dict[str, Any]] = {}
    for file in files:
        dense, touched = file["ways"]["dense"], file["ways"]["rows"]
        row = rows.setdefault(file["job"], {"job": file["job"], "between_hosts": [], "one_host": []})
        row |= {"all_bytes": sent(dense), "touched_bytes": sent(touched)}
        place = "one_host" if file["hosts"] == 1 else "between_hosts"
        row[place].append(speed(dense["seconds"], touched["seconds"]))
    return list(rows.values())


def sent(way: Mapping[str, Any]) -> int:
    return sum(way["usage"]["sent"].values())


def shared_of(files: Sequence[File]) -> dict[str, Any]:
    """Bytes that a rank of two counts, MiB of all ranks by their number, and how much faster shared replicas are."""
    found: dict[str, Any] = {"speed": []}
    for file in files:
        if "memory" in file:
            found["memory"] = {way: file["memory"][way] for way in ("dense", "shared")}
        else:
            ways = {way: file["ways"][way] for way in ("dense", "shared")}
            found["held"] = {way: [each["usage"][name] for name in HELD] for way, each in ways.items()}
            found["speed"].append(speed(ways["dense"]["seconds"], ways["shared"]["seconds"]))
    return found


def rows_text(rows: Sequence[Mapping[str, Any]], language: str) -> str:
    lines = [
        [
            JOBS[row["job"]][language],
            megabytes(row["all_bytes"]),
            megabytes(row["touched_bytes"]),
            spread(row["between_hosts"], language),
            spread(row["one_host"], language),
        ]
        for row in rows
    ]
    return markdown_table(TITLES[language], lines)


def megabytes(count: float) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 1e6 else f"{count / 1e6:.2f} MB"


def spread(found: Sequence[float], language: str) -> str:
    ends = dict.fromkeys(f"{each:.3g}" for each in (min(found), max(found))) if found else {}
    return TO[language].join(ends)


def shared_text(found: Mapping[str, Any], language: str) -> str:
    words = SHARED[language]
    comma = {"en": ", ", "zh": "、"}[language]
    ways = ("dense", "shared")
    memory = {way: {int(ranks): total for ranks, total in found["memory"][way].items()} for way in ways}
    lines = [
        [words["held"], *(comma.join(f"{each / 1e6:.0f}" for each in found["held"][way]) for way in ways)],
        [words["memory"], *(f"{memory[way][2]:.0f} / {memory[way][4]:.0f}" for way in ways)],
        [words["more"], *(str(int((memory[way][4] - memory[way][2]) / 2 + 0.5)) for way in ways)],
        [words["speed"], "1", spread(found["speed"], language)],
    ]
    return markdown_table([words["title"], "`dpN`", words["shared"]], lines)


TO = {"en": " to ", "zh": " 到 "}
JOBS: Mapping[str, Mapping[str, str]] = {
    "recommender": {"en": "a recommender, 150,000 rows x 64", "zh": "推荐模型，150,000 行 x 64"},
    "examples/reviews.yaml": {
        "en": "`examples/reviews.yaml`, 4,000 reviews",
        "zh": "`examples/reviews.yaml`，4,000 条评论",
    },
}
TITLES: Mapping[str, Sequence[str]] = {
    "en": (
        "two ranks",
        "sent a step, all rows",
        "touched rows",
        "times the speed, 1 Gbit/s between two hosts",
        "one host, shared memory",
    ),
    "zh": (
        "两个 rank",
        "每步发送，所有行",
        "只发查到的行",
        "两台主机之间 1 Gbit/s 时的速度倍数",
        "一台主机，共享内存",
    ),
}
SHARED: Mapping[str, Mapping[str, str]] = {
    "en": {
        "title": "28 million numbers, AdamW (fused), float32",
        "shared": "shared",
        "held": "parameters, gradients, state that a rank of two counts, MB",
        "memory": "memory of all ranks (Pss), 2 / 4 ranks, MiB",
        "more": "each rank more (mean of the third and fourth), MiB",
        "speed": "times the speed of `dp2`, one thread a rank",
    },
    "zh": {
        "title": "2800 万个数，AdamW（fused），float32",
        "shared": "共享",
        "held": "两个 rank 时每个 rank 计入的参数、梯度、状态，MB",
        "memory": "所有 rank 的内存（Pss），2 / 4 个 rank，MiB",
        "more": "每多一个 rank（第三、第四个的平均），MiB",
        "speed": "速度是 `dp2` 的几倍，每个 rank 一个线程",
    },
}
RESULTS: Mapping[str, Callable[[Sequence[File]], Any]] = {"rows": rows_of, "shared": shared_of}
TABLES: Mapping[str, MeasuredTable] = {
    name: MeasuredTable(
        name=f"replicas-{name}",
        part=f"benchmarks/replicas_tables.py {name}",
        page="docs/communication.md",
        text=text,
    )
    for name, text in (("rows", rows_text), ("shared", shared_text))
}


if __name__ == "__main__":
    main()
