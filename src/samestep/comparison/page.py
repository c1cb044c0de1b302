"""The report as one page of HTML in English and Chinese: its sections, put together from tables and plots."""

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from samestep.comparison import bilingual
from samestep.comparison.methods import PUBLISHED, SINGLE_CORE, Published
from samestep.comparison.plots import color, figures
from samestep.display.page import Cell, Words, both, document, html_table, paragraph, plot, section
from samestep.display.tables import formatted

if TYPE_CHECKING:  # a comparison writes this page of itself
    from samestep.comparison.results import Comparison, ComparisonRow


def times(found: "Comparison") -> str:
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
    return html_table("times-table", columns, [_time_cells(found, row) for row in found.rows])


def _time_cells(found: "Comparison", row: "ComparisonRow") -> list[Cell]:
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
        Cell(formatted(row.seconds, "{:.2f}")),
        Cell(f"{min(seconds):.2f} - {max(seconds):.2f}"),
        Cell(formatted(found.speed_up(row), "{:.2f}")),
        Cell(formatted(found.speed_up(row, SINGLE_CORE), "{:.2f}")),
        Cell(formatted(row.median(lambda run: run.samples_per_second), "{:,.0f}")),
        Cell(f"{row.runs[0].steps:,}"),
        Cell(formatted(row.median(lambda run: run.startup_seconds), "{:.1f}")),
    ]


def costs(found: "Comparison") -> str:
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
    return html_table("costs-table", columns, [_cost_cells(row) for row in found.rows if row.runs or row.same_step])


def _cost_cells(row: "ComparisonRow") -> list[Cell]:
    """MB a rank and in all, MB sent in a step, score, and the difference from one process's steps."""
    held = row.same_step
    return [
        _name(row),
        Cell(row.precision, "words"),
        Cell(formatted(row.largest_memory, "{:,.0f}", 1e6)),
        Cell(formatted(row.all_memory, "{:,.0f}", 1e6)),
        Cell(formatted(row.sent, "{:,.2f}", 1e6)),
        Cell(formatted(row.metric, "{:.4f}")),
        Cell(f"{held.difference:.1e}" if held else ""),
        Cell(f"{held.tolerance:.2g}, {held.precision}" if held else ""),
        _same_step(row),
    ]


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
        Cell(formatted(row.seconds, "{:.2f}")),
        Cell(formatted(found.speed_up(row), "{:.2f}")),
        Cell(str(place)),
        _same_step(row),
    ]


def page(found: "Comparison") -> str:
    """The page as text. It holds plotly's program and needs nothing from elsewhere."""
    name = str(found.job.name or found.job.recipe.task)
    heading = bilingual.HEADING.format(job=name)
    return document("compare", title=name, heading=heading, figures=figures(found), body=_body(found))


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
