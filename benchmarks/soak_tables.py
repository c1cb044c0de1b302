"""The tables of soaks in docs/faults.md and docs/zh/faults.md, from the JSON files of `samestep drill --soak`.

    samestep drill job.yaml --layout dp2 --soak 1200 --between 5s --json build/soak/1200.json
    samestep drill job.yaml --layout dp2 --soak 40 --between 15s --json build/soak/15s.json
    samestep drill job.yaml --layout dp2 --soak 20 --between 60s --json build/soak/60s.json
    python benchmarks/soak_tables.py build/soak/*.json [--docs]

The table has a row for each file, the one with the most faults first. With `--hosts`, it is the table of files of
benchmarks/soak_hosts.py.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "tools")]

from page_parts import markdown_table, write_parts  # noqa: E402

DOCS = {"en": HERE.parent / "docs" / "faults.md", "zh": HERE.parent / "docs" / "zh" / "faults.md"}
PARTS = {False: "benchmarks/soak_tables.py", True: "benchmarks/soak_tables.py --hosts"}

TITLES = {
    "en": (
        "faults",
        "apart, on average",
        "layout, steps",
        "final weights, losses",
        "samples lost, repeated",
        "goodput",
        "recovery, median",
        "slowest",
        "left: processes, folders",
    ),
    "zh": (
        "故障",
        "平均间隔",
        "布局，步数",
        "最终权重，损失",
        "丢失、重复的样本",
        "有效产出",
        "恢复，中位数",
        "最慢",
        "遗留：进程，文件夹",
    ),
}
WORDS = {
    "en": {
        "same": "the same bits",
        "other": "others",
        "of": "{} of {}",
        "s": "{} s",
        ", ": ", ",
        "kinds": "The {:,} faults were {}.",
        "not ended": "the run did not end",
    },
    "zh": {
        "same": "逐位相同",
        "other": "不同",
        "of": "{1} 次中 {0} 次",
        "s": "{} 秒",
        ", ": "，",
        "kinds": "这 {:,} 次故障是：{}。",
        "not ended": "运行没有结束",
    },
}


def row(soaked: Mapping[str, Any], language: str) -> list[str]:
    """The table row of one soak."""
    words = WORDS[language]
    count = sum(soaked["faults"].values())
    bits = [words["same" if soaked[name] else "other"] for name in ("same_weights", "same_losses")]
    comma = words[", "]
    return [
        f"{count:,}" if count == soaked["wanted"] else words["of"].format(f"{count:,}", f"{soaked['wanted']:,}"),
        words["s"].format(f"{soaked['between']:g}"),
        f"{soaked['layout']}{comma}{soaked['steps']:,}",
        comma.join(bits) if soaked["ended"] else words["not ended"],
        f"{soaked['samples_lost']}{comma}{soaked['samples_repeated']}",
        f"{soaked['goodput']:.2f}",
        *(
            "" if soaked[name] is None else words["s"].format(f"{soaked[name]:.1f}")
            for name in ("median_recovery", "slowest_recovery")
        ),
        f"{soaked['left_processes']}{comma}{soaked['left_files']}",
    ]


def text(soaks: Sequence[Mapping[str, Any]], language: str) -> str:
    """The table, and the kinds of faults of the longest soak."""
    ordered = sorted(soaks, key=lambda soaked: -sum(soaked["faults"].values()))
    words, most = WORDS[language], ordered[0]["faults"]
    kinds = words[", "].join(f"`{kind}` {count:,}" for kind, count in sorted(most.items()))
    table = markdown_table(TITLES[language], [row(soaked, language) for soaked in ordered])
    return f"{table}\n\n{words['kinds'].format(sum(most.values()), kinds)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", help="JSON files of soaks")
    parser.add_argument("--hosts", action="store_true", help="they were of several hosts")
    parser.add_argument("--docs", action="store_true", help="write the table into the docs")
    given = parser.parse_args()
    soaks = [json.loads(file.read_text(encoding="utf-8")) for file in given.files]
    print(text(soaks, "en"))
    for language, page in DOCS.items() if given.docs else ():
        write_parts(page, {PARTS[given.hosts]: text(soaks, language)})


if __name__ == "__main__":
    main()
