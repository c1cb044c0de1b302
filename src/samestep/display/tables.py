"""The one way to print a table in the terminal: titled columns, rows of cells, and where they are printed to.

What a table says is built where its subject is, as columns and rows; how it looks is decided here. Cells are wrapped
where a terminal is narrow, and long words folded, so nothing of them is lost; `whole` columns stay in one line.
Sentences around a table are printed with `soft_wrap=True`: one line each in a file, which a program can search.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.box import HEAVY_HEAD, SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from samestep.errors import printable

WIDTH = 120  # characters that wide tables fit into

Cell = str | Text  # a Text has a style of its own, such as a verdict's colour

_BOXES = {"all": HEAVY_HEAD, "head": SIMPLE, "none": None}
_PADDING = {"none": (0, 2, 0, 0)}  # above, right, below, left: without lines two spaces part the columns


def plain_console(*, width: int | None = None, highlight: bool = True) -> Console:
    """Standard output, with names as they are: a class called "[red]" is not a colour.

    `width`: characters of a line where the output is a file or a pipe; None: as many as rich takes there, 80.
    """
    console = Console(markup=False, emoji=False, highlight=highlight)
    if width is None or console.is_terminal:
        return console
    return Console(markup=False, emoji=False, highlight=highlight, width=width)


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column's title, and how its cells are set."""

    title: str
    right: bool = False  # aligned, as numbers are
    whole: bool = False  # in one line; cut where the terminal is too narrow
    least: int | None = None  # characters that it keeps while others are wrapped


def texts(*titles: str, whole: bool = False, least: int | None = None) -> list[Column]:
    """Columns of words, aligned to the left."""
    return [Column(title=title, whole=whole, least=least) for title in titles]


def numbers(*titles: str, whole: bool = False) -> list[Column]:
    """Columns of numbers, aligned to the right."""
    return [Column(title=title, right=True, whole=whole) for title in titles]


def table(
    columns: Sequence[Column],
    rows: Iterable[Sequence[Cell]],
    *,
    title: str | None = None,
    caption: str | None = None,
    lines: Literal["all", "head", "none"] = "all",
    grouped: bool = False,
) -> Table:
    """Build a table for a console to print; a row may be shorter than the columns.

    `lines`: around every column, below the titles only, or none. `grouped`: a line before each row that has text in
    its first cell.
    """
    made = Table(title=title, caption=caption, box=_BOXES[lines], padding=_PADDING.get(lines, (0, 1)))
    for column in columns:
        made.add_column(
            column.title,
            justify="right" if column.right else "left",
            no_wrap=column.whole,
            overflow="ellipsis" if column.whole else "fold",
            min_width=column.least,
        )
    for row in rows:
        if grouped and made.row_count and row[0]:
            made.add_section()
        made.add_row(*(printable(cell) if isinstance(cell, str) else cell for cell in row))
    return made


def values_table(values: Mapping[str, str], *, title: str | None = None) -> Table:
    """Build a table without a header: a name and its value a row."""
    made = Table(title=title, show_header=False)
    for name, value in values.items():
        made.add_row(printable(name), printable(value))
    return made


def formatted(value: float | None, pattern: str, unit: float = 1.0) -> str:
    """A number of some unit by a pattern such as "{:.1f}"; no text where there is no number."""
    return "" if value is None else pattern.format(value / unit)
