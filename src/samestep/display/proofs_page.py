"""Proofs of jobs as one page of HTML, in both languages: verdicts, the first difference, plots, numbers."""

from collections.abc import Sequence
from functools import partial
from html import escape

import plotly.graph_objects as go

from samestep.display.page import (
    GRID,
    Cell,
    Words,
    both,
    bullets,
    document,
    figure_layout,
    html_table,
    in_languages,
    json_in_html,
    paragraph,
    plot,
    section,
)
from samestep.display.steps_figure import Line, on_axis, steps_figure
from samestep.display.tables import formatted
from samestep.verification.matrix import MatrixRow

_HEADING = Words("{job}: the steps of {count} versus one process", "{job}：{count} 的步与单进程对比")
_LAYOUTS = Words("{count} layouts", "{count} 种布局")
_JOBS = Words("{count} jobs", "{count} 个任务")
_VERDICTS = {
    "same": Words("the same step", "同一步"),
    "NOT same": Words("NOT the same step", "不是同一步"),
    "can't tell": Words("can't tell whether it is the same step", "无法判断是否为同一步"),
    "refused": Words("refused", "被拒绝"),
    "failed": Words("failed", "失败"),
}
_DIFFERENCES = Words("Largest differences", "最大差异")
_ABOUT_DIFFERENCES = Words(
    "The largest relative difference of each quantity from one process's. Below its tolerance, a difference "
    "is rounding by any measure; above it, the verdict says what it was judged by.",
    "各个量与单进程之间最大的相对差异。低于容差的差异一定是舍入；高于它时，结论会说明判断依据。",
)
_STEPS = Words("Difference by step", "各步的差异")
_ABOUT_STEPS = Words(
    "Relative differences of losses (solid) and gradient norms (dotted) in each step.",
    "每一步的损失（实线）与梯度范数（点线）的相对差异。",
)
_NUMBERS = Words("Numbers", "数值")
_REMARKS = Words("Remarks", "说明")
_TOLERANCE = Words("tolerance", "容差")
_QUANTITIES = {
    "loss": (Words("loss", "损失"), "circle", "#d55e00"),
    "grad_norm": (Words("gradient norm", "梯度范数"), "diamond", "#0072b2"),
    "parameters": (Words("parameters", "参数"), "square", "#009e73"),
    "metrics": (Words("metrics", "指标"), "cross", "#cc79a7"),
}
_BY_STEP = (("loss", "solid"), ("grad_norm", "dot"))


def page(rows: Sequence[MatrixRow]) -> str:
    """The page as text, of one proof or of many. It holds plotly's program and needs nothing from elsewhere."""
    jobs, layouts = list(dict.fromkeys(row.job for row in rows)), {row.layout for row in rows}
    job = Words(jobs[0], jobs[0]) if len(jobs) == 1 else _JOBS.format(count=len(jobs))
    count = Words(rows[0].layout, rows[0].layout) if len(layouts) == 1 else _LAYOUTS.format(count=len(layouts))
    heading = Words(
        _HEADING.en.format(job=job.en, count=count.en),
        _HEADING.zh.format(job=job.zh, count=count.zh),
    )
    return document(
        "verify",
        title=job.en,
        heading=heading,
        figures=json_in_html({name: in_languages(partial(draw, rows)) for name, draw in _FIGURES.items()}),
        body=_body(rows),
    )


def _body(rows: Sequence[MatrixRow]) -> str:
    """The page's parts: a verdict for each row or their counts, remarks, both plots, the table."""
    parts = [paragraph(_summary(rows), "good" if all(row.passed for row in rows) else "bad")]
    if remarks := [remark for row in rows for remark in _remarks(row, named=len(rows) > 1)]:
        parts.append(bullets(_REMARKS, remarks))
    if any(row.proof is not None for row in rows):
        parts.append(section(_DIFFERENCES, plot("differences"), _ABOUT_DIFFERENCES))
        parts.append(section(_STEPS, plot("steps"), _ABOUT_STEPS))
    parts.append(section(_NUMBERS, _table(rows)))
    return "\n".join(parts)


def _verdict(row: MatrixRow) -> Words:
    """A row's verdict. That of a value that isn't finite is its kind, in both languages."""
    return _VERDICTS.get(row.verdict, Words(row.verdict, row.verdict))


def _summary(rows: Sequence[MatrixRow]) -> Words:
    """The verdict of one row, or how many rows have each."""
    if len(rows) == 1:
        verdict = _verdict(rows[0])
        return Words(f"{rows[0].layout}: {verdict.en}", f"{rows[0].layout}：{verdict.zh}")
    counts: dict[Words, int] = {}
    for row in rows:
        counts[_verdict(row)] = counts.get(_verdict(row), 0) + 1
    return Words(
        ", ".join(f"{verdict.en}: {count}" for verdict, count in counts.items()),
        "，".join(f"{verdict.zh}：{count}" for verdict, count in counts.items()),
    )


def _remarks(row: MatrixRow, *, named: bool) -> Sequence[Words]:
    """Why a row was refused or failed, the kind of its first difference, and what its proof remarks.

    `named`: with the row's job and layout.
    """
    remarks = [Words(words, words) for words in (row.words if row.proof is None else row.proof.words())]
    if row.proof is not None and row.proof.departure is not None:
        departure = row.proof.departure
        zh = f"首个差异：{departure.place.zh}：{departure.words.zh} [{departure.kind}]"
        remarks.insert(0, Words(f"first difference: {departure.line}", zh))
    if not named or (row.passed and row.proof is not None):
        return [] if named else remarks
    return [Words(f"{row.job}, {row.layout}: {en}", f"{row.job}，{row.layout}：{zh}") for en, zh in remarks]


def _table(rows: Sequence[MatrixRow]) -> str:
    """The numbers of each row."""
    columns = [
        (Words("job", "任务"), "words"),
        (Words("layout", "布局"), "words"),
        *((words, "") for words, *_ in _QUANTITIES.values()),
        (_TOLERANCE, ""),
        (Words("verdict", "结论"), "words"),
    ]
    cells = []
    for row in rows:
        differences = row.proof.max_relative_difference if row.proof is not None else {}
        tolerance = row.proof.tolerance if row.proof is not None else None
        cells.append(
            [
                Cell(escape(row.job), "words"),
                Cell(escape(row.layout), "words"),
                *(Cell(formatted(differences.get(name), "{:.2e}")) for name in _QUANTITIES),
                Cell(formatted(tolerance, "{:.0e}")),
                Cell(both(_verdict(row)), "words" if row.passed else "words bad"),
            ]
        )
    return html_table("numbers-table", columns, cells)


def _names(rows: Sequence[MatrixRow]) -> Sequence[str]:
    """Names of the rows on an axis: the layouts, with the jobs where there are several."""
    several = len({row.job for row in rows}) > 1
    return [f"{row.job}: {row.layout}" if several else row.layout for row in rows]


def _differences(rows: Sequence[MatrixRow], language: int) -> go.Figure:
    """The largest difference of each quantity, a row a layout, on a logarithmic axis."""
    names = _names(rows)
    proved = [(name, row.proof) for name, row in zip(names, rows, strict=True) if row.proof is not None]
    figure = go.Figure(layout=figure_layout(180 + 24 * len(proved)))
    for quantity, (title, symbol, color) in _QUANTITIES.items():
        points = [
            (proof.max_relative_difference[quantity], name)
            for name, proof in proved
            if quantity in proof.max_relative_difference
        ]
        figure.add_scatter(
            x=[on_axis(value) for value, _ in points],
            y=[name for _, name in points],
            name=title[language],
            mode="markers",
            marker={"symbol": symbol, "size": 10, "color": color},
        )
    figure.add_scatter(
        x=[proof.tolerance for _, proof in proved],
        y=[name for name, _ in proved],
        name=_TOLERANCE[language],
        mode="markers",
        marker={"symbol": "line-ns-open", "size": 18, "color": "#333333"},
    )
    figure.update_xaxes(type="log", exponentformat="power", gridcolor=GRID)
    figure.update_yaxes(autorange="reversed", automargin=True, ticksuffix="  ", type="category")
    return figure


def _steps(rows: Sequence[MatrixRow], language: int) -> go.Figure:
    """Differences of losses and gradient norms by step, a line a layout, on a logarithmic axis."""
    lines = []
    for name, row in zip(_names(rows), rows, strict=True):
        for quantity, dash in _BY_STEP if row.proof is not None else ():
            values = row.proof.by_step.get(quantity, ()) if row.proof is not None else ()
            words = _QUANTITIES[quantity][0]
            lines.append(Line(name=Words(f"{name}, {words.en}", f"{name}, {words.zh}"), values=values, dash=dash))
    return steps_figure(lines, language)


_FIGURES = {"differences": _differences, "steps": _steps}
