"""Pages of HTML in English and Chinese, which open from disk and need no network: their parts and their tables.

A page holds both languages and shows one. It carries plotly's program and the figures of its plots, once for each
language; plotly is imported only when a page is written, since not every installation has it.
"""

import json
from collections.abc import Callable, Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import Any, NamedTuple


class Words(NamedTuple):
    en: str
    zh: str

    def format(self, **values: object) -> "Words":
        return Words(self.en.format(**values), self.zh.format(**values))


LANGUAGES = Words._fields


_NO_SCRIPT = Words("The plots need JavaScript; the tables do not.", "图需要 JavaScript；表格不需要。")
_FONT = 'system-ui, "Segoe UI", "Helvetica Neue", "Noto Sans", "Noto Sans CJK SC", sans-serif'
GRID = "#e3e8ed"


class Cell(NamedTuple):
    """HTML content of a table cell, and the class of its `td`."""

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


def section(title: Words, content: str, about: Words | None = None) -> str:
    return f"<section>\n<h2>{both(title)}</h2>\n{paragraph(about, 'quiet') if about else ''}\n{content}\n</section>"


def paragraph(text: Words, kind: str = "") -> str:
    return f'<p class="{kind}">{both(text)}</p>'


def plot(name: str) -> str:
    """Where the figure of that name is drawn."""
    return f'<div class="plot" id="{name}"></div><noscript><p>{both(_NO_SCRIPT)}</p></noscript>'


def document(command: str, *, title: str, heading: Words, figures: str, body: str) -> str:
    """A command's page in both languages, with plotly's program. `figures`: JSON by the name of their plots."""
    from plotly.offline import get_plotlyjs

    return Template(_file("page.html")).substitute(
        command=command,
        title=escape(title),
        heading=both(heading),
        css=_file("page.css"),
        js=_file("page.js"),
        plotly=get_plotlyjs(),
        figures=figures,
        body=body,
    )


def _file(name: str) -> str:
    return (files("samestep.display") / name).read_text(encoding="utf-8")


def figure_layout(height: int) -> dict[str, Any]:
    """What all figures of a page have in common; `height` in pixels."""
    return {
        "template": "none",
        "height": height,
        "autosize": True,
        "margin": {"l": 70, "r": 20, "t": 16, "b": 60},
        "font": {"family": _FONT, "size": 13, "color": "#1f2328"},
        "paper_bgcolor": "#ffffff",
        "plot_bgcolor": "#ffffff",
    }


def in_languages(draw: Callable[[int], Any]) -> dict[str, Any]:
    """Draw a plotly figure once for each language, by the language's number, as values that JSON can hold."""
    return {language: json.loads(draw(number).to_json()) for number, language in enumerate(LANGUAGES)}


def json_in_html(value: Any) -> str:
    """JSON for a script element, whose end a text in it must not be taken for."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
