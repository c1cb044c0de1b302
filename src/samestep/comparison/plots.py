"""The plots of a report, by plotly: the same figure once for each language."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING, Any

import plotly.graph_objects as go

from samestep.display.page import GRID, Words, figure_layout, in_languages, json_in_html

if TYPE_CHECKING:
    from samestep.comparison.results import Comparison, ComparisonRow

# Okabe and Ito's colours, which people who see few colours tell apart; a family of engines has one.
_COLORS = {
    "native": "#d55e00",
    "handwritten": "#0072b2",
    "data-parallel": "#56b4e9",
    "deepspeed": "#009e73",
    "accelerate": "#cc79a7",
    "horovod": "#e69f00",
}
_ONE_PROCESS, _OTHER = "#5c6670", "#7a6a00"
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")

Draw = Callable[["Comparison", "Sequence[ComparisonRow]", int], go.Figure]


def color(row: "ComparisonRow") -> str:
    """One colour an engine."""
    if row.processes == 1 and row.method.engine == "native":
        return _ONE_PROCESS
    return _COLORS.get(row.method.engine, _OTHER)


def figures(comparison: "Comparison") -> str:
    """Every figure by its name and its language, as JSON that may stand in a page."""
    rows = [row for row in comparison.rows if row.runs]
    drawn = {name: in_languages(partial(draw, comparison, rows)) for name, draw in _FIGURES.items()}
    return json_in_html(drawn)


def _times(comparison: "Comparison", rows: "Sequence[ComparisonRow]", language: int) -> go.Figure:
    """Bars from nothing to the median, and a line from the fastest to the slowest repeat."""
    medians = [row.seconds or 0.0 for row in rows]
    seconds = [[run.seconds for run in row.runs] for row in rows]
    bar = go.Bar(
        y=_names(rows, language),
        x=medians,
        orientation="h",
        marker_color=[color(row) for row in rows],
        error_x={
            "type": "data",
            "symmetric": False,
            "array": [max(runs) - middle for runs, middle in zip(seconds, medians, strict=True)],
            "arrayminus": [middle - min(runs) for runs, middle in zip(seconds, medians, strict=True)],
            "color": "#1f2328",
            "thickness": 1.4,
        },
        hovertemplate="%{y}: %{x:.3f} s<extra></extra>",
    )
    return _bars([bar], rows, Words("seconds of training", "训练时间（秒）")[language])


def _losses(comparison: "Comparison", rows: "Sequence[ComparisonRow]", language: int) -> go.Figure:
    figure = go.Figure()
    for row, dash in _dashed(rows):
        steps = list(range(1, len(row.runs[0].losses) + 1))
        figure.add_scatter(
            x=steps,
            y=list(row.runs[0].losses),
            name=row.method.title[language],
            mode="lines",
            line={"color": color(row), "dash": dash, "width": 1.8},
        )
    return _lines(figure, Words("step", "步")[language], Words("training loss", "训练损失")[language])


def _scores(comparison: "Comparison", rows: "Sequence[ComparisonRow]", language: int) -> go.Figure:
    figure = go.Figure()
    for row, dash in _dashed(rows):
        scores = row.runs[0].scores
        figure.add_scatter(
            x=[score.seconds for score in scores],
            y=[score.value for score in scores],
            name=row.method.title[language],
            mode="lines+markers",
            line={"color": color(row), "dash": dash, "width": 1.8},
        )
    metric = (comparison.metric_name or "").replace("_", " ")
    return _lines(figure, Words("seconds of training", "训练时间（秒）")[language], metric)


def _memory(comparison: "Comparison", rows: "Sequence[ComparisonRow]", language: int) -> go.Figure:
    """Peak memory of each rank, in MB."""
    of_ranks = [row.runs[0].peak_memory_bytes for row in rows]
    return _ranks(rows, of_ranks, 1e6, language, Words("peak memory of a rank, MB", "每个 rank 的峰值内存（MB）"))


def _traffic(comparison: "Comparison", rows: "Sequence[ComparisonRow]", language: int) -> go.Figure:
    """What each rank sends in a step, in MB."""
    of_ranks = [row.runs[0].sent_bytes for row in rows]
    title = Words("sent by a rank in one step, MB", "每个 rank 每步发送（MB）")
    return _ranks(rows, of_ranks, 1e6, language, title)


def _ranks(
    rows: "Sequence[ComparisonRow]", of_ranks: Sequence[Sequence[int]], unit: float, language: int, title: Words
) -> go.Figure:
    """A bar to the largest rank, and a dot for every one."""
    names = _names(rows, language)
    largest = [max(values, default=0) / unit for values in of_ranks]
    bar = go.Bar(
        y=names,
        x=largest,
        orientation="h",
        marker_color=[color(row) for row in rows],
        hovertemplate="%{y}: %{x:,.2f} MB<extra></extra>",
    )
    dots = [
        (name, number, value / unit)
        for name, values in zip(names, of_ranks, strict=True)
        for number, value in enumerate(values)
    ]
    every = go.Scatter(
        y=[name for name, _, _ in dots],
        x=[value for _, _, value in dots],
        text=[f"rank {number}" for _, number, _ in dots],
        mode="markers",
        marker={"color": "#ffffff", "size": 7, "line": {"color": "#1f2328", "width": 1.2}},
        hovertemplate="%{y}, %{text}: %{x:,.2f} MB<extra></extra>",
    )
    return _bars([bar, every], rows, title[language])


def _names(rows: "Sequence[ComparisonRow]", language: int) -> list[str]:
    """What the rows are called on an axis. Pairs of one engine and layout may share a title, and names don't."""
    titles = [row.method.title[language] for row in rows]
    return [
        title if titles.count(title) == 1 else f"{title} ({row.method.name})"
        for title, row in zip(titles, rows, strict=True)
    ]


def _dashed(rows: "Sequence[ComparisonRow]") -> "list[tuple[ComparisonRow, str]]":
    """The rows, each with a dash that no other of its colour has, as far as there are dashes."""
    dashes = {shade: cycle(_DASHES) for shade in map(color, rows)}
    return [(row, next(dashes[color(row)])) for row in rows]


def _bars(traces: Sequence[Any], rows: "Sequence[ComparisonRow]", title: str) -> go.Figure:
    figure = go.Figure(traces, layout=figure_layout(height=96 + 27 * len(rows)))
    figure.update_layout(showlegend=False, bargap=0.32, margin_l=10)
    figure.update_xaxes(title_text=title, rangemode="tozero", gridcolor=GRID, zerolinecolor="#8c959f")
    figure.update_yaxes(autorange="reversed", automargin=True, ticksuffix="  ")
    return figure


def _lines(figure: go.Figure, across: str, up: str) -> go.Figure:
    figure.update_layout(figure_layout(height=460))
    figure.update_layout(showlegend=True, legend={"font_size": 12, "tracegroupgap": 0})
    figure.update_xaxes(title_text=across, gridcolor=GRID, zeroline=False, linecolor="#8c959f")
    figure.update_yaxes(title_text=up, gridcolor=GRID, zeroline=False, linecolor="#8c959f")
    return figure


_FIGURES: dict[str, Draw] = {
    "times": _times,
    "losses": _losses,
    "scores": _scores,
    "memory": _memory,
    "traffic": _traffic,
}
