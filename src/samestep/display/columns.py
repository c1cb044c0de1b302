"""Columns of tables that are printed in the terminal and in a page: each is declared once, with both titles.

What a table's own outputs show differently, such as a name that the page gives a colour, they pass as `instead`, by
the column's key.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from html import escape
from typing import Generic, TypeVar

from samestep.display import tables
from samestep.display.page import Cell, Heading, Words

Row = TypeVar("Row")


@dataclass(frozen=True)
class SharedColumn(Generic[Row]):
    """A column's titles in the terminal and in the page, and the text of its cell in a row.

    None as a title: the column is not in that output.
    """

    terminal: str | None
    page: Words | str | None
    text: Callable[[Row], str]
    _: KW_ONLY
    key: str = ""
    words: bool = False  # aligned to the left
    whole: bool = False  # in the terminal in one line
    least: int | None = None  # characters that it keeps in the terminal


def terminal_columns(columns: Sequence[SharedColumn[Row]]) -> list[tables.Column]:
    return [
        tables.Column(title=column.terminal, right=not column.words, whole=column.whole, least=column.least)
        for column in columns
        if column.terminal is not None
    ]


def terminal_cells(columns: Sequence[SharedColumn[Row]], row: Row) -> list[str]:
    return [column.text(row) for column in columns if column.terminal is not None]


def page_columns(columns: Sequence[SharedColumn[Row]]) -> list[Heading]:
    return [Heading(column.page, _kind(column)) for column in columns if column.page is not None]


def page_cells(
    columns: Sequence[SharedColumn[Row]], row: Row, instead: Mapping[str, Callable[[Row], Cell]] | None = None
) -> list[Cell]:
    """Cells of a page's row; those of the keys in `instead` are made by its functions."""
    made = instead or {}
    return [
        made[column.key](row) if column.key in made else Cell(escape(column.text(row)), _kind(column))
        for column in columns
        if column.page is not None
    ]


def _kind(column: SharedColumn[Row]) -> str:
    return "words" if column.words else ""
