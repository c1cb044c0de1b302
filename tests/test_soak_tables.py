"""The tables of soaks that benchmarks/soak_tables.py and soak.py write into docs/faults.md."""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from samestep.drill.soak import SoakReport

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

pytestmark = pytest.mark.quick


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{name}_benchmark", BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tables = script("soak_tables")


def soaked(**changed: Any) -> dict[str, Any]:
    found = {
        "layout": "dp2",
        "steps": 4500,
        "seed": 1,
        "between": 5.0,
        "wanted": 1200,
        "faults": {"pause": 700, "kill": 500},
        "ended": True,
        "same_weights": True,
        "same_losses": True,
        "samples_lost": 0,
        "samples_repeated": 0,
        "goodput": 0.8765,
        "slowest_recovery": 13.04,
        "median_recovery": 0.849,
        "left_processes": 0,
        "left_files": 0,
        "last_words": "",
    }
    return SoakReport(**{**found, **changed}).to_json()


def cells(text: str) -> list[list[str]]:
    return [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]


def test_each_soak_is_a_row_and_the_longest_comes_first() -> None:
    few: dict[str, Any] = {"faults": {"hang": 20}, "wanted": 20, "between": 60.0}
    _, _, first, second = cells(tables.text([soaked(**few), soaked()], "en"))
    same, left = "the same bits, the same bits", "0, 0"
    assert first == ["1,200", "5 s", "dp2, 4,500", same, left, "0.88", "0.8 s", "13.0 s", left]
    assert second[:2] == ["20", "60 s"]
    assert "The 1,200 faults were `kill` 500, `pause` 700." in tables.text([soaked()], "en")


def test_what_went_wrong_is_not_hidden() -> None:
    wrong = {"faults": {"kill": 7}, "same_losses": False, "samples_lost": 16, "left_files": 2}
    *_, row = cells(tables.text([soaked(**wrong)], "en"))
    assert row[0] == "7 of 1,200"
    assert row[3:5] == ["the same bits, others", "16, 0"]
    assert row[-1] == "0, 2"
    *_, row = cells(tables.text([soaked(ended=False, slowest_recovery=None, median_recovery=None)], "en"))
    assert (row[3], row[6:8]) == ("the run did not end", ["", ""])


@pytest.mark.parametrize("hosts", [False, True])
def test_both_pages_have_a_place_for_each_table(hosts: bool) -> None:
    for page in tables.DOCS.values():
        marks = re.escape(f"<!-- {tables.PARTS[hosts]} -->\n")
        assert len(re.findall(f"{marks}.*?<!-- end -->", page.read_text(encoding="utf-8"), re.DOTALL)) == 1


def test_the_chinese_table_has_the_same_numbers() -> None:
    one, other = (re.findall(r"\d[\d,.]*", tables.text([soaked()], language)) for language in ("en", "zh"))
    assert [number.strip(",.") for number in one] == [number.strip(",.") for number in other]


def test_a_way_that_had_to_be_helped_shows_it() -> None:
    soak = script("soak")
    row = soak.Row(
        way="torchrun",
        faults={"kill": 12, "hang": 8},
        alone=5,
        stepped_in=3,
        ended=True,
        same_weights=False,
        goodput=0.314,
        recoveries=[2.0, 44.04, 3.0],
        left_processes=1,
        seconds=300.0,
        last_words="",
    )
    *_, line = cells(soak.table([row], "en"))
    assert line == ["`torchrun --standalone`", "20", "5", "3", "others", "0.31", "3.0 s", "44.0 s", "1"]
