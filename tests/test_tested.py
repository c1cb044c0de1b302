"""The table of docs/tested.md: a line for each thing that was tried, in an order of its own, in both languages."""

from pathlib import Path
from typing import Any

import pytest
import tested
from page_parts import write_parts

pytestmark = pytest.mark.quick

PULLED: dict[str, Any] = {
    "place": "hostfile, over SSH",
    "command": "samestep launch ...",
    "tried": "a cable pulled for 3 s",
    "seen": "survived; the losses of one process",
    "first_step_seconds": 4.56,
    "recovery_seconds": 3.21,
    "limits": "--heartbeat-timeout 8 s",
}
PLAIN = {**PULLED, "tried": "2 hosts", "seen": "the losses of one process", "recovery_seconds": None, "limits": ""}
FIRST = {**PLAIN, "place": "torchrun", "command": "torchrun ...", "first_step_seconds": None}


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.parametrize("language", ["en", "zh"])
def test_a_line_has_all_that_was_seen_and_what_was_broken_comes_last(language: str) -> None:
    _, _, first, plain, pulled = tested.table([PULLED, PLAIN, FIRST], language).splitlines()
    assert cells(first)[0] == "torchrun"
    assert cells(first)[4:] == ["", "", ""]
    assert cells(plain)[4:] == ["4.6", "", ""]
    if language == "en":
        head = ["hostfile, over SSH", "`samestep launch ...`", PULLED["tried"], PULLED["seen"]]
        assert cells(pulled) == [*head, "4.6", "3.2", "--heartbeat-timeout 8 s"]
    else:
        assert cells(pulled)[2:] == [
            "网线拔掉 3 秒",
            "挺了过去；与单进程的损失相同",
            "4.6",
            "3.2",
            "--heartbeat-timeout 8 秒",
        ]


def test_words_that_have_no_chinese_are_refused() -> None:
    with pytest.raises(KeyError, match="has no Chinese for 'a flood'"):
        tested.chinese("a flood")


def test_a_page_without_marks_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "tested.md"
    page.write_text("no table", encoding="utf-8")
    with pytest.raises(SystemExit, match="has 0 parts <!-- tested -->"):
        write_parts(page, {"tested": "a table"})
