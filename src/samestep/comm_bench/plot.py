"""Bus bandwidth and time over the size of a message, as a picture: SVG drawn here, HTML by plotly."""

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from samestep.comm.measure import Row
from samestep.comm_bench.request import size_in_words
from samestep.comm_bench.results import Report
from samestep.display import curves_svg
from samestep.display.curves_svg import COLOURS, DASHES, Curve, Panel, Scale
from samestep.errors import UserError

_PLOTLY_DASHES = ("solid", "dash", "dot", "dashdot")


def check_file(file: Path | None) -> None:
    """Raise UserError for a kind of picture that can't be made."""
    if file is None:
        return
    if file.suffix not in (".svg", ".html"):
        raise UserError(f"--plot {file}: a picture is SVG or HTML; use a name that ends in .svg or .html")
    if file.suffix == ".html" and importlib.util.find_spec("plotly") is None:
        raise UserError(
            f'--plot {file} needs plotly, which is not installed; pip install "samestep[report]", or use a name that '
            "ends in .svg"
        )


def write_plot(report: Report, file: Path) -> None:
    text = _html(report) if file.suffix == ".html" else svg(report)
    file.write_text(text, encoding="utf-8")


def _panels(report: Report) -> Mapping[str, Sequence[Curve]]:
    bus = _curves(report, lambda row: (row.bus_bandwidth or 0.0) / 1e9)
    limit = {row.bytes: rate / 1e9 for row in report.rows if row.bytes and (rate := report.limit(row))}
    if limit:
        bus.append(Curve(name="limit", colour=len(COLOURS) - 1, dash=2, points=sorted(limit.items())))
    return {"bus bandwidth, GB/s": bus, "time of a call, ms": _curves(report, lambda row: row.seconds_median * 1e3)}


def _curves(report: Report, of: Callable[[Row], float]) -> list[Curve]:
    names = list(dict.fromkeys(row.collective for row in report.rows if row.bytes))
    return [
        Curve(
            name=f"{name}, {transport}" if len(report.transports) > 1 else name,
            colour=colour % (len(COLOURS) - 1),
            dash=dash % len(DASHES),
            points=points,
        )
        for colour, name in enumerate(names)
        for dash, transport in enumerate(report.transports)
        if (
            points := [
                (float(row.bytes), of(row))
                for row in report.rows
                if (row.collective, row.transport) == (name, transport) and row.bytes
            ]
        )
    ]


def _title(report: Report) -> str:
    hosts = len(set(report.hosts))
    return f"collectives on {len(report.hosts)} ranks of {hosts} host{'s' if hosts > 1 else ''}"


def svg(report: Report) -> str:
    """The picture as SVG: a panel above the other, both axes logarithmic."""
    sizes = Scale(base=2, step=2, in_words=size_in_words)
    return curves_svg.svg(
        _title(report),
        [
            Panel(title=f"{_title(report)}: {name}", curves=curves, across=sizes, up=Scale(base=10))
            for name, curves in _panels(report).items()
        ],
    )


def _html(report: Report) -> str:
    """The picture as one page that needs nothing from elsewhere, with plotly's program in it."""
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    panels = _panels(report)
    figure = make_subplots(rows=len(panels), cols=1, subplot_titles=list(panels), vertical_spacing=0.1)
    for number, curves in enumerate(panels.values(), start=1):
        for curve in curves:
            x, y = zip(*curve.points, strict=True)
            looks: dict[str, Any] = {"color": COLOURS[curve.colour], "dash": _PLOTLY_DASHES[curve.dash]}
            trace = go.Scatter(x=x, y=y, name=curve.name, legendgroup=curve.name, line=looks, showlegend=number == 1)
            figure.add_trace(trace, row=number, col=1)
    figure.update_xaxes(type="log", title_text="bytes")
    figure.update_yaxes(type="log")
    figure.update_layout(title_text=_title(report), height=1000, template="plotly_white")
    return figure.to_html(include_plotlyjs=True, full_html=True)
