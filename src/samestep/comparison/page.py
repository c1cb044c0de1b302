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


def times(comparison: "Comparison") -> str:
    """Table of time and speed of each method, or the reason why it wasn't measured."""
    facts, figures = known_columns(), time_columns(comparison)
    rows = [
        [
            *page_cells(facts, row, {"method": _name}),
            *(page_cells(figures, row) if row.status == "measured" else [_reason(row)]),
        ]
        for row in comparison.rows
    ]
    return html_table("times-table", page_columns([*facts, *figures]), rows)


def _reason(row: "ComparisonRow") -> Cell:
    return Cell(f"{both(bilingual.STATUS[row.status])}: {escape(row.reason or '')}", "reason")


def costs(comparison: "Comparison") -> str:
    """Table of memory, traffic, score, and agreement with one process, of methods that ran."""
    columns = cost_columns(comparison)
    instead = {"method": _name, "same_step": _same_step}
    rows = [page_cells(columns, row, instead) for row in comparison.rows if row.runs or row.same_step]
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


def published(comparison: "Comparison") -> str:
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
    ours = [_fastest(comparison, method) for method in PUBLISHED]
    their_places = places([method.minutes for method in PUBLISHED])
    our_places = places([row.seconds if row else None for row in ours])
    alone = PUBLISHED[0].minutes
    rows = [
        (
            method.minutes,
            [
                Cell(both(method.name), "words"),
                Cell(f"{method.minutes:.2f}"),
                Cell(f"{alone / method.minutes:.2f}"),
                Cell(str(their_place)),
                Cell(both(method.fault) if method.fault else "", "wrap"),
                *_our_cells(comparison, row, place),
            ],
        )
        for method, row, their_place, place in zip(PUBLISHED, ours, their_places, our_places, strict=True)
    ]
    return html_table("published-table", columns, [cells for _, cells in sorted(rows, key=lambda pair: pair[0])])


def places(values: Sequence[float | None]) -> list[int | None]:
    """Rank the values in ascending order from 1; None stays None."""
    ordered = sorted(value for value in values if value is not None)
    return [None if value is None else ordered.index(value) + 1 for value in values]


def _fastest(comparison: "Comparison", method: Published) -> "ComparisonRow | None":
    """The fastest of the methods that a published measurement is of."""
    rows = [row for name in method.methods if (row := comparison.row(name)) is not None and row.seconds is not None]
    return min(rows, key=lambda row: row.seconds or 0.0, default=None)


def _our_cells(comparison: "Comparison", row: "ComparisonRow | None", place: int | None) -> list[Cell]:
    if row is None:
        return [Cell(both(bilingual.NOT_MEASURED), "reason")]
    return [
        _name(row),
        *page_cells([column for column in time_columns(comparison) if column.key in ("seconds", "speed_up")], row),
        Cell(str(place)),
        _same_step(row),
    ]


def page(comparison: "Comparison") -> str:
    """The page as text. It holds plotly's program and needs nothing from elsewhere."""
    heading = bilingual.HEADING.format(job=comparison.title)
    return document(
        "compare", title=comparison.title, heading=heading, figures=figures(comparison), body=_body(comparison)
    )


def _body(comparison: "Comparison") -> str:
    metric = (comparison.metric_name or "metric").replace("_", " ")
    recipe = comparison.job.recipe
    intro = bilingual.INTRO.format(
        methods=len(comparison.rows),
        measured=sum(bool(row.runs) for row in comparison.rows),
        processes=comparison.processes,
        cores=comparison.cores,
        repeats=comparison.repeats,
        batch=recipe.batch,
        precision=recipe.precision,
    )
    return "\n".join(
        [
            paragraph(intro),
            paragraph(
                bilingual.PASSED if comparison.passed else bilingual.NOT_PASSED,
                "good" if comparison.passed else "bad",
            ),
            section(bilingual.TABLE, times(comparison), bilingual.ABOUT_TIMES),
            section(bilingual.COSTS, costs(comparison), bilingual.ABOUT_COSTS),
            *([section(bilingual.REMARKS, _remarks(comparison))] if comparison.remarks else []),
            section(bilingual.TIME, plot("times"), bilingual.ABOUT_SPREAD),
            section(bilingual.LOSS, plot("losses"), bilingual.ABOUT_LOSS),
            section(bilingual.SCORE.format(metric=metric), plot("scores"), bilingual.ABOUT_SCORE),
            section(bilingual.MEMORY, plot("memory"), bilingual.ABOUT_MEMORY),
            section(bilingual.TRAFFIC, plot("traffic"), bilingual.ABOUT_TRAFFIC),
            section(bilingual.PUBLISHED, published(comparison), bilingual.ABOUT_PUBLISHED),
            section(bilingual.MACHINE, _machine(comparison)),
        ]
    )


def _remarks(comparison: "Comparison") -> str:
    """List of the messages that runs printed, each with the methods that did."""
    lines = [f"<li>{escape(', '.join(names))}: {escape(remark)}</li>" for remark, names in comparison.remarks.items()]
    return "<ul>" + "".join(lines) + "</ul>"


def _machine(comparison: "Comparison") -> str:
    machine = comparison.machine
    memory = machine.get("memory_bytes")
    lines: list[tuple[Words, str]] = [
        (Words("system", "系统"), str(machine["system"])),
        (Words("processor", "处理器"), str(machine["processor"])),
        (Words("cores", "核数"), str(machine["cores"])),
        (Words("memory", "内存"), f"{memory / 1e9:,.1f} GB" if memory else ""),
        (Words("accelerators", "加速器"), str(machine["accelerators"])),
    ]
    versions = {**comparison.versions, **machine["packages"]}
    lines += [(Words(name, name), version) for name, version in sorted(versions.items())]
    return "<dl>" + "".join(f"<dt>{both(name)}</dt><dd>{escape(value)}</dd>" for name, value in lines) + "</dl>"
