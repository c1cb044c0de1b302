"""Parts of pages that commands write: between their marks, with nothing else changed, and never beside them."""

from pathlib import Path

import pytest
from page_parts import markdown_table, write_parts

pytestmark = pytest.mark.quick

PAGE = "before\n\n<!-- one -->\nold\n<!-- end -->\n\nbetween\n\n<!-- two -->\n<!-- /two -->\nafter\n"


def test_parts_are_written_between_their_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE, encoding="utf-8")
    write_parts(page, {"two": "new \\1", "one": "| a |"})
    once = page.read_text(encoding="utf-8")
    assert once == (
        "before\n\n<!-- one -->\n\n| a |\n\n<!-- end -->\n\nbetween\n\n"
        "<!-- two -->\n\nnew \\1\n\n<!-- /two -->\nafter\n"
    )
    write_parts(page, {"two": "new \\1", "one": "| a |"})
    assert page.read_text(encoding="utf-8") == once


@pytest.mark.parametrize(
    ("text", "found"), [("no marks\n", 0), ("<!-- three -->\nwithout an end\n", 0), (PAGE.replace("two", "one"), 2)]
)
def test_a_page_without_just_one_such_part_is_left_as_it_is(tmp_path: Path, text: str, found: int) -> None:
    page = tmp_path / "page.md"
    page.write_text(text, encoding="utf-8")
    with pytest.raises(SystemExit, match=rf"has {found} parts"):
        write_parts(page, {"one" if found else "three": "new"})
    assert page.read_text(encoding="utf-8") == text


def test_a_table_has_its_first_columns_to_the_left() -> None:
    assert markdown_table(["a", "b"], [["1", "2"]]) == "| a | b |\n| --- | --: |\n| 1 | 2 |"
    assert markdown_table(["a", "b"], [], align="l") == "| a | b |\n| --- | --- |"
    assert markdown_table(["a", "b", "c"], [], align="lcr") == "| a | b | c |\n| --- | :-: | --: |"
