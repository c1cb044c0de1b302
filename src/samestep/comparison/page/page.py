"""The report as one page of HTML: its sections, put together from tables and plots."""

from collections.abc import Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import NamedTuple

from plotly.offline import get_plotlyjs

from samestep.comparison import bilingual
from samestep.comparison.bilingual import Words
from samestep.comparison.methods import SINGLE_CORE
from samestep.comparison.page.plots import color, figures
from samestep.comparison.results import PUBLISHED, Comparison, Published, Row, places
from samestep.comparison.terminal import show


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


def times(found: Comparison) -> str:
    """Table of time and speed of each method, or the reason why it wasn't measured."""
    columns = [
        (Words("method", "方法"), "words"),
        (Words("engine", "引擎"), "words"),
        (Words("layout", "布局"), "words"),
        (Words("processes", "进程数"), ""),
        (Words("seconds of training, median", "训练秒数（中位数）"), ""),
        (Words("min - max", "最小 - 最大"), ""),
        (Words("times one process", "相对单进程"), ""),
        (Words("times one core", "相对单核"), ""),
        (Words("samples/s", "样本/秒"), ""),
        (Words("steps", "步数"), ""),
        (Words("start-up, s", "启动（秒）"), ""),
    ]
    return table("times-table", columns, [_time_cells(found, row) for row in found.rows])


def _time_cells(found: Comparison, row: Row) -> list[Cell]:
    """Seconds, their spread over repeats, speed-up over one process and over one core."""
    known = [
        _name(row),
        Cell(escape(row.method.engine), "words"),
        Cell(escape(row.method.layout), "words"),
        Cell(str(row.processes)),
    ]
    if row.status != "measured":
        return [*known, Cell(f"{both(bilingual.STATUS[row.status])}: {escape(row.reason or '')}", "reason")]
    seconds = [run.seconds for run in row.runs]
    return [
        *known,
        Cell(show(row.seconds, "{:.2f}")),
        Cell(f"{min(seconds):.2f} - {max(seconds):.2f}"),
        Cell(show(found.speed_up(row), "{:.2f}")),
        Cell(show(found.speed_up(row, SINGLE_CORE), "{:.2f}")),
        Cell(show(row.median(lambda run: run.samples_per_second), "{:,.0f}")),
        Cell(f"{row.runs[0].steps:,}"),
        Cell(show(row.median(lambda run: run.startup_seconds), "{:.1f}")),
    ]


def costs(found: Comparison) -> str:
    """Table of memory, traffic, score, and agreement with one process, of methods that ran."""
    metric = (found.metric_name or "metric").replace("_", " ")
    columns = [
        (Words("method", "方法"), "words"),
        (Words("precision", "精度"), "words"),
        (Words("MB, largest rank", "MB，最大的 rank"), ""),
        (Words("MB, all ranks", "MB，全部 rank"), ""),
        (Words("MB sent, step and rank", "MB，每步每 rank 发送"), ""),
        (Words(metric, metric), ""),
        (Words("largest difference of the first losses", "前几步损失的最大差异"), ""),
        (Words("tolerance", "容差"), ""),
        (Words("same step", "同一步"), "words"),
    ]
    return table("costs-table", columns, [_cost_cells(row) for row in found.rows if row.runs or row.same_step])


def _cost_cells(row: Row) -> list[Cell]:
    """MB a rank and in all, MB sent in a step, score, and the difference from one process's steps."""
    held = row.same_step
    return [
        _name(row),
        Cell(row.precision, "words"),
        Cell(show(row.largest_memory, "{:,.0f}", 1e6)),
        Cell(show(row.all_memory, "{:,.0f}", 1e6)),
        Cell(show(row.sent, "{:,.2f}", 1e6)),
        Cell(show(row.metric, "{:.4f}")),
        Cell(f"{held.difference:.1e}" if held else ""),
        Cell(f"{held.tolerance:.2g}, {held.precision}" if held else ""),
        _same_step(row),
    ]


def _same_step(row: Row) -> Cell:
    """Whether the method takes one process's step."""
    if not row.synchronous:
        return Cell(both(bilingual.ASYNCHRONOUS), "words")
    if row.same_step is None:
        return Cell("", "words")
    return (
        Cell(both(bilingual.SAME), "words good")
        if row.same_step.same
        else Cell(both(bilingual.NOT_SAME), "words bad")
    )


def _name(row: Row) -> Cell:
    return Cell(f'<span class="key" style="background:{color(row)}"></span>{both(row.method.title)}', "words")


def published(found: Comparison) -> str:
    """The published rows in the order of their time, each beside the fastest of our methods that do the same."""
    columns = [
        (Words("published method", "已发表的方法"), "words"),
        (Words("minutes", "分钟"), ""),
        (Words("times its single GPU", "相对它的单 GPU"), ""),
        (Words("its place", "它的名次"), ""),
        (Words("its fault", "它的问题"), "wrap"),
        (Words("here", "这里"), "words"),
        (Words("seconds", "秒"), ""),
        (Words("times one process", "相对单进程"), ""),
        (Words("place", "名次"), ""),
        (Words("same step", "同一步"), "words"),
    ]
    ours = [_fastest(found, each) for each in PUBLISHED]
    their_places = places([each.minutes for each in PUBLISHED])
    our_places = places([row.seconds if row else None for row in ours])
    alone = PUBLISHED[0].minutes
    rows = [
        (
            each.minutes,
            [
                Cell(both(each.name), "words"),
                Cell(f"{each.minutes:.2f}"),
                Cell(f"{alone / each.minutes:.2f}"),
                Cell(str(their_place)),
                Cell(both(each.fault) if each.fault else "", "wrap"),
                *_our_cells(found, row, place),
            ],
        )
        for each, row, their_place, place in zip(PUBLISHED, ours, their_places, our_places, strict=True)
    ]
    return table("published-table", columns, [cells for _, cells in sorted(rows, key=lambda pair: pair[0])])


def _fastest(found: Comparison, each: Published) -> Row | None:
    """The fastest of the methods that a published measurement is of."""
    rows = [row for name in each.methods if (row := found.row(name)) is not None and row.seconds is not None]
    return min(rows, key=lambda row: row.seconds or 0.0, default=None)


def _our_cells(found: Comparison, row: Row | None, place: int | None) -> list[Cell]:
    if row is None:
        return [Cell(both(bilingual.NOT_MEASURED), "reason")]
    return [
        _name(row),
        Cell(show(row.seconds, "{:.2f}")),
        Cell(show(found.speed_up(row), "{:.2f}")),
        Cell(str(place)),
        _same_step(row),
    ]


def page(found: Comparison) -> str:
    """The page as text. It holds plotly's program and needs nothing from elsewhere."""
    name = str(found.job.name or found.job.recipe.task)
    heading = bilingual.HEADING.format(job=name)
    return document("compare", title=name, heading=heading, figures=figures(found), body=_body(found))


def document(command: str, *, title: str, heading: Words, figures: str, body: str) -> str:
    """A command's page in both languages, with plotly's program. `figures`: JSON by the name of their plots."""
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


def _body(found: Comparison) -> str:
    metric = (found.metric_name or "metric").replace("_", " ")
    recipe = found.job.recipe
    intro = bilingual.INTRO.format(
        methods=len(found.rows),
        measured=sum(bool(row.runs) for row in found.rows),
        processes=found.processes,
        cores=found.cores,
        repeats=found.repeats,
        batch=recipe.batch,
        precision=recipe.precision,
    )
    return "\n".join(
        [
            paragraph(intro),
            paragraph(bilingual.PASSED if found.passed else bilingual.NOT_PASSED, "good" if found.passed else "bad"),
            section(bilingual.TABLE, times(found), bilingual.ABOUT_TIMES),
            section(bilingual.COSTS, costs(found), bilingual.ABOUT_COSTS),
            section(bilingual.TIME, plot("times"), bilingual.ABOUT_SPREAD),
            section(bilingual.LOSS, plot("losses"), bilingual.ABOUT_LOSS),
            section(bilingual.SCORE.format(metric=metric), plot("scores"), bilingual.ABOUT_SCORE),
            section(bilingual.MEMORY, plot("memory"), bilingual.ABOUT_MEMORY),
            section(bilingual.TRAFFIC, plot("traffic"), bilingual.ABOUT_TRAFFIC),
            section(bilingual.PUBLISHED, published(found), bilingual.ABOUT_PUBLISHED),
            section(bilingual.MACHINE, _machine(found)),
        ]
    )


def section(title: Words, content: str, about: Words | None = None) -> str:
    return f"<section>\n<h2>{both(title)}</h2>\n{paragraph(about, 'quiet') if about else ''}\n{content}\n</section>"


def paragraph(text: Words, kind: str = "") -> str:
    return f'<p class="{kind}">{both(text)}</p>'


def plot(name: str) -> str:
    """Where the figure of that name is drawn."""
    return f'<div class="plot" id="{name}"></div><noscript><p>{both(bilingual.NO_SCRIPT)}</p></noscript>'


def _machine(found: Comparison) -> str:
    machine = found.machine
    memory = machine.get("memory_bytes")
    lines: list[tuple[Words, str]] = [
        (Words("system", "系统"), str(machine["system"])),
        (Words("processor", "处理器"), str(machine["processor"])),
        (Words("cores", "核数"), str(machine["cores"])),
        (Words("memory", "内存"), f"{memory / 1e9:,.1f} GB" if memory else ""),
        (Words("accelerators", "加速器"), str(machine["accelerators"])),
    ]
    versions = {**found.versions, **machine["packages"]}
    lines += [(Words(name, name), version) for name, version in sorted(versions.items())]
    return "<dl>" + "".join(f"<dt>{both(name)}</dt><dd>{escape(value)}</dd>" for name, value in lines) + "</dl>"


def _file(name: str) -> str:
    return (files("samestep.comparison.page") / name).read_text(encoding="utf-8")
