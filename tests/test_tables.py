"""The one way to print a table: only columns that stay in one line are cut, and groups of rows are parted."""

import io

import pytest
from rich.console import Console
from rich.text import Text

from samestep.display.tables import Table, formatted, numbers, table, texts, values_table
from samestep.sizes import binary_size, decimal_size, parse_size

pytestmark = pytest.mark.quick


def printed(made: Table, width: int = 40) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width).print(made)
    return out.getvalue().splitlines()


def test_long_words_are_folded_and_numbers_aligned() -> None:
    columns = [*texts("name"), *numbers("seconds", whole=True)]
    lines = printed(table(columns, [["a_name_that_is_longer_than_its_column", "1.5"], ["b", "12.25"]]), 24)
    assert all(len(line) == 24 for line in lines)
    folded = "".join(line.split("│")[1].strip() for line in lines if line.startswith("│"))
    assert folded == "a_name_that_is_longer_than_its_columnb"
    assert [line.split("│")[2] for line in lines if line.startswith("│") and "." in line] == [
        "     1.5 ",
        "   12.25 ",
    ]


def test_a_column_that_stays_in_one_line_is_cut() -> None:
    (line,) = [each for each in printed(table(texts("", whole=True), [["word " * 20]]), 20) if "word" in each]
    assert "…" in line


def test_a_line_stands_before_each_group() -> None:
    rows = [["a", "1"], ["", "2"], ["b", "3"]]
    lines = printed(table(texts("group", "value"), rows, grouped=True))
    parted = [index for index, line in enumerate(lines) if line.startswith("├")]
    assert [lines[index + 1].split("│")[1].strip() for index in parted] == ["b"]


def test_cells_may_have_styles_and_rows_may_end_early() -> None:
    lines = printed(table(texts("", "of", "more"), [[Text("ok", style="green"), "1"]], lines="none"))
    assert lines[-1].split() == ["ok", "1"]


def test_values_have_no_header() -> None:
    lines = printed(values_table({"steps": "3"}, title="a run"))
    assert [line.strip(" │") for line in lines if "│" in line] == ["steps │ 3"]
    assert "a run" in lines[0]


def test_a_number_that_is_missing_is_blank() -> None:
    assert (formatted(2_500_000, "{:,.1f} MB", 1e6), formatted(0, "{:.0f}"), formatted(None, "{:.1f}")) == (
        "2.5 MB",
        "0",
        "",
    )


def test_bytes_have_three_digits_in_units_of_1000_and_a_decimal_in_units_of_1024() -> None:
    assert [decimal_size(count) for count in (0, 999, 1000, 1_234_567, 999_700, 4e10)] == [
        "0 B",
        "999 B",
        "1 kB",
        "1.23 MB",
        "1 MB",
        "40 GB",
    ]
    assert [binary_size(count) for count in (1023, 1024, 1536, 2**20 - 1, 60 * 2**30)] == [
        "1023 B",
        "1 KiB",
        "1.5 KiB",
        "1 MiB",
        "60 GiB",
    ]


@pytest.mark.parametrize(
    ("text", "decimal", "binary"),
    [
        ("4GB", 4e9, 2**32),
        ("4GiB", 2**32, 2**32),
        ("1.5 kb", 1500, 1536),
        ("7", 7, 7),
        ("7 B", 7, 7),
        ("K", None, None),
        ("4I", None, None),
        ("4IB", None, None),
    ],
)
def test_a_kib_has_1024_bytes_and_a_kb_what_its_reader_says(
    text: str, decimal: float | None, binary: float | None
) -> None:
    assert (parse_size(text, kilo=1000), parse_size(text, kilo=1024)) == (decimal, binary)
