"""The tables that benchmarks/turns_tables.py writes into the docs: new columns come in, the others stay."""

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

from page_parts import read_part

from benchmarks.turns_tables import PAGES, PART, joined, read, tables, updated

TABLES = """2 processes on a host:

| way | reviews, fp32 | language, fp32 |
| --- | --- | --- |
| hand-written DDP | 1.00: 73 ms | 1.00: 280 ms |
| Accelerate | 1.02 (1.01-1.03) | 1.00 (1.00-1.00) |
| samestep, tpN |  | 1.35 (1.35-1.35) |"""


def row(way: str, ratios: list[float], **more: Any) -> dict[str, Any]:
    seconds = [0.1 * ratio for ratio in ratios]
    common = {"job": "reviews", "precision": "fp32", "hosts": 1, "processes": 2, "rate": None}
    return {**common, "way": way, "ratios": ratios, "seconds": seconds, **more}


def test_measured_columns_take_the_place_of_their_own_and_others_stay() -> None:
    hosts: dict[str, Any] = {"hosts": 2, "rate": "1gbit"}
    rows = [
        row("ddp", [1.0, 1.0, 1.0]),
        row("samestep", [0.9, 0.8]),
        row("samestep", [0.7]),
        row("ddp", [1.0], **hosts),
        row("alone", [0.52], **hosts),
    ]
    assert updated(TABLES, tables(joined(rows), "en"), "en") == TABLES.replace(
        """| hand-written DDP | 1.00: 73 ms | 1.00: 280 ms |
| Accelerate | 1.02 (1.01-1.03) | 1.00 (1.00-1.00) |
| samestep, tpN |  | 1.35 (1.35-1.35) |""",
        """| hand-written DDP | 1.00: 100 ms | 1.00: 280 ms |
| Accelerate |  | 1.00 (1.00-1.00) |
| samestep | 0.80 (0.70-0.90) |  |
| samestep, tpN |  | 1.35 (1.35-1.35) |

2 hosts of 2 processes each, links of 1gbit:

| way | reviews, fp32 |
| --- | --- |
| hand-written, no messages | 0.52 (0.52-0.52) |
| hand-written DDP | 1.00: 100 ms |""",
    )


@pytest.mark.parametrize("language", PAGES)
def test_the_pages_are_read_without_loss(language: str) -> None:
    text = read_part(PAGES[language], PART)
    assert text.count("|") > 100
    assert updated(text, {}, language) == text


def test_the_chinese_tables_have_the_cells_of_the_english_ones() -> None:
    english, chinese = (
        [[list(column.values()) for column in columns.values()] for columns in read(read_part(page, PART)).values()]
        for page in PAGES.values()
    )
    assert chinese == english
