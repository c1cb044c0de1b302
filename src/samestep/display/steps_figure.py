"""The figure of differences by step, on the pages of scripts' proofs and of jobs'."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import plotly.graph_objects as go

from samestep.display.page import GRID, Words, figure_layout

# Limits of a logarithmic axis.
LEAST = 1e-17
_MOST = 1e3


@dataclass(frozen=True, kw_only=True)
class Line:
    """One quantity's relative differences, from step 1 on."""

    name: Words
    values: Sequence[float]
    dash: str
    color: str | None = None  # None: the next of plotly's


def on_axis(value: float) -> float:
    """A difference within the limits of the axis; one that isn't finite stands at the upper one."""
    return min(max(value, LEAST), _MOST) if value < inf else _MOST


def steps_figure(lines: Sequence[Line], language: int) -> go.Figure:
    """Differences over steps, on a logarithmic axis."""
    figure = go.Figure(layout=figure_layout(420))
    for line in lines:
        figure.add_scatter(
            x=list(range(1, len(line.values) + 1)),
            y=[on_axis(value) for value in line.values],
            name=line.name[language],
            mode="lines+markers",
            line={"dash": line.dash, "width": 1.8, **({} if line.color is None else {"color": line.color})},
        )
    figure.update_xaxes(title_text=Words("step", "步")[language], gridcolor=GRID, dtick=1)
    figure.update_yaxes(type="log", exponentformat="power", gridcolor=GRID)
    return figure
