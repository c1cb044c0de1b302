"""Pieces of HTML: a text in both languages, a table, values that can't break out of the page."""

import json
from collections.abc import Sequence
from html import escape
from typing import Any, NamedTuple

from samestep.comparison.words import Words


class Cell(NamedTuple):
    """What stands in a cell, as HTML, and how it looks: the class of its `td`."""

    html: str
    kind: str = ""


def both(words: Words) -> str:
    """A text in both languages, of which the page shows one; where they are one text, that."""
    if words.en == words.zh:
        return escape(words.en)
    return f'<span lang="en">{escape(words.en)}</span><span lang="zh">{escape(words.zh)}</span>'


def table(name: str, columns: Sequence[tuple[Words, str]], rows: Sequence[Sequence[Cell]]) -> str:
    """A table whose columns have a title and a class; a last cell that stands alone fills its row."""
    head = "".join(f'<th scope="col" class="{kind}">{both(title)}</th>' for title, kind in columns)
    lines = []
    for row in rows:
        cells = [f'<td class="{cell.kind}">{cell.html}</td>' for cell in row]
        if len(row) < len(columns):
            left = len(columns) - len(row) + 1
            cells[-1] = f'<td class="{row[-1].kind}" colspan="{left}">{row[-1].html}</td>'
        lines.append(f"<tr>{''.join(cells)}</tr>")
    body = "\n".join(lines)
    return f'<div class="scroll"><table id="{name}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def json_in_html(value: Any) -> str:
    """JSON for a script element, whose end a text in it must not be taken for."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
