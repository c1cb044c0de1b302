"""The tables of a report: what every method took and reached, and the published comparison beside it."""

from html import escape

from samestep.comparison.methods import SINGLE_CORE
from samestep.comparison.page import texts
from samestep.comparison.page.html import Cell, both, table
from samestep.comparison.page.plots import color
from samestep.comparison.published import PUBLISHED, Published, places
from samestep.comparison.rows import Comparison, Row
from samestep.comparison.table import show
from samestep.comparison.words import Words


def times(found: Comparison) -> str:
    """Time and speed of every method, or the reason why it has none."""
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
    known = [
        _name(row),
        Cell(escape(row.method.engine), "words"),
        Cell(escape(row.method.layout), "words"),
        Cell(str(row.processes)),
    ]
    if row.status != "measured":
        return [*known, Cell(f"{both(texts.STATUS[row.status])}: {escape(row.reason or '')}", "reason")]
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
    """Memory, messages, what was learned, and whether the steps were the same; of methods that ran."""
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
    if not row.synchronous:
        return Cell(both(texts.ASYNCHRONOUS), "words")
    if row.same_step is None:
        return Cell("", "words")
    return Cell(both(texts.SAME), "words good") if row.same_step.same else Cell(both(texts.NOT_SAME), "words bad")


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
    rows = [row for name in each.methods if (row := found.row(name)) is not None and row.seconds is not None]
    return min(rows, key=lambda row: row.seconds or 0.0, default=None)


def _our_cells(found: Comparison, row: Row | None, place: int | None) -> list[Cell]:
    if row is None:
        return [Cell(both(texts.NOT_MEASURED), "reason")]
    return [
        _name(row),
        Cell(show(row.seconds, "{:.2f}")),
        Cell(show(found.speed_up(row), "{:.2f}")),
        Cell(str(place)),
        _same_step(row),
    ]
