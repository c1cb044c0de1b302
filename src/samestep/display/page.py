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


class Heading(NamedTuple):
    """Title of a table's column, and the class of its `th`."""

    title: Words | str
    kind: str = ""


class Cell(NamedTuple):
    """HTML content of a table cell, and the class of its `td`."""

    html: str
    kind: str = ""


def both(words: Words | str) -> str:
    """A text in both languages, of which the page shows one; where they are one text, that."""
    if isinstance(words, str):
        return escape(words)
    if words.en == words.zh:
        return escape(words.en)
    return f'<span lang="en">{escape(words.en)}</span><span lang="zh">{escape(words.zh)}</span>'


def html_table(name: str, columns: Sequence[tuple[Words | str, str]], rows: Sequence[Sequence[Cell]]) -> str:
    """A table as HTML; `columns`: title and class of each. A last cell with none after it fills its row."""
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


def bullets(title: Words, items: Sequence[Words | str]) -> str:
    """A section with a list."""
    return section(title, f"<ul>{''.join(f'<li>{both(item)}</li>' for item in items)}</ul>")


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


_PLAIN_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1000px; padding: 0 1rem; color: #1b1f24 }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th, td { border-bottom: 1px solid #d5dae0; padding: .3rem .5rem; text-align: right; vertical-align: top }
th:first-child, td:first-child { text-align: left } td.words { text-align: left }
.scroll { overflow-x: auto }
@media (prefers-color-scheme: dark) { body { background: #15181c; color: #e6e9ec } th, td { border-color: #3a4149 } }
"""


def plain_document(title: str, body: Sequence[str], style: str) -> str:
    """A page without plotly and without a choice of languages, whose texts have both; `style`: CSS of its own."""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<link rel="icon" href="data:,"><style>{_PLAIN_STYLE}{style}</style></head><body>\n'
        + "\n".join(body)
        + "\n</body></html>\n"
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
