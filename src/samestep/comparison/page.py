"""The report as one page of HTML in English and Chinese: its sections, put together from tables and plots."""

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from samestep.comparison import bilingual
from samestep.comparison.columns import cost_columns, known_columns, time_columns
from samestep.comparison.methods import PUBLISHED, Published
from samestep.comparison.plots import color, figures
from samestep.display.columns import page_cells, page_columns
from samestep.display.page import Cell, Words, both, document, html_table, paragraph, plot, section

if TYPE_CHECKING:  # a comparison writes this page of itself
    from samestep.comparison.results import Comparison, ComparisonRow


def times(found: "Comparison") -> str:
    """Table of time and speed of each method, or the reason why it wasn't measured."""
    known, figures = known_columns(), time_columns(found)
    rows = [
        [
            *page_cells(known, row, {"method": _name}),
            *(page_cells(figures, row) if row.status == "measured" else [_reason(row)]),
        ]
        for row in found.rows
    ]
    return html_table("times-table", page_columns([*known, *figures]), rows)


def _reason(row: "ComparisonRow") -> Cell:
    return Cell(f"{both(bilingual.STATUS[row.status])}: {escape(row.reason or '')}", "reason")


def costs(found: "Comparison") -> str:
    """Table of memory, traffic, score, and agreement with one process, of methods that ran."""
    columns = cost_columns(found)
    instead = {"method": _name, "same_step": _same_step}
    rows = [page_cells(columns, row, instead) for row in found.rows if row.runs or row.same_step]
    return html_table("costs-table", page_columns(columns), rows)


def _same_step(row: "ComparisonRow") -> Cell:
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


def _name(row: "ComparisonRow") -> Cell:
    return Cell(f'<span class="key" style="background:{color(row)}"></span>{both(row.method.title)}', "words")


def published(found: "Comparison") -> str:
    """The published rows in the order of their time, each with the fastest of our methods that do the same."""
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
    return html_table("published-table", columns, [cells for _, cells in sorted(rows, key=lambda pair: pair[0])])


def places(values: Sequence[float | None]) -> list[int | None]:
    """Rank the values in ascending order from 1; None stays None."""
    known = sorted(value for value in values if value is not None)
    return [None if value is None else known.index(value) + 1 for value in values]


def _fastest(found: "Comparison", each: Published) -> "ComparisonRow | None":
    """The fastest of the methods that a published measurement is of."""
    rows = [row for name in each.methods if (row := found.row(name)) is not None and row.seconds is not None]
    return min(rows, key=lambda row: row.seconds or 0.0, default=None)


def _our_cells(found: "Comparison", row: "ComparisonRow | None", place: int | None) -> list[Cell]:
    if row is None:
        return [Cell(both(bilingual.NOT_MEASURED), "reason")]
    return [
        _name(row),
        *page_cells([each for each in time_columns(found) if each.key in ("seconds", "speed_up")], row),
        Cell(str(place)),
        _same_step(row),
    ]


def page(found: "Comparison") -> str:
    """The page as text. It holds plotly's program and needs nothing from elsewhere."""
    heading = bilingual.HEADING.format(job=found.title)
    return document("compare", title=found.title, heading=heading, figures=figures(found), body=_body(found))


def _body(found: "Comparison") -> str:
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
            *([section(bilingual.REMARKS, _remarks(found))] if found.remarks else []),
            section(bilingual.TIME, plot("times"), bilingual.ABOUT_SPREAD),
            section(bilingual.LOSS, plot("losses"), bilingual.ABOUT_LOSS),
            section(bilingual.SCORE.format(metric=metric), plot("scores"), bilingual.ABOUT_SCORE),
            section(bilingual.MEMORY, plot("memory"), bilingual.ABOUT_MEMORY),
            section(bilingual.TRAFFIC, plot("traffic"), bilingual.ABOUT_TRAFFIC),
            section(bilingual.PUBLISHED, published(found), bilingual.ABOUT_PUBLISHED),
            section(bilingual.MACHINE, _machine(found)),
        ]
    )


def _remarks(found: "Comparison") -> str:
    """List of the messages that runs printed, each with the methods that did."""
    lines = [f"<li>{escape(', '.join(names))}: {escape(remark)}</li>" for remark, names in found.remarks.items()]
    return "<ul>" + "".join(lines) + "</ul>"


def _machine(found: "Comparison") -> str:
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
