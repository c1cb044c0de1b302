"""Bus bandwidth and time over the size of a message, as a picture: SVG drawn here, HTML by plotly."""

import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from samestep.comm.measure import Row
from samestep.comm_bench.request import size_in_words
from samestep.comm_bench.results import Report
from samestep.errors import UserError

# Okabe and Ito's colours and three more, which people who see few colours tell apart.
_COLOURS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#7a6a00", "#5c6670")
_DASHES = ("", "6 4", "2 3", "9 3 2 3")
_PLOTLY_DASHES = ("solid", "dash", "dot", "dashdot")
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 900, 360, 80, 230, 44, 50


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A line of a picture."""

    name: str
    colour: int
    dash: int
    points: Sequence[tuple[float, float]]  # bytes and what is shown of them


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
        bus.append(Curve(name="limit", colour=len(_COLOURS) - 1, dash=2, points=sorted(limit.items())))
    return {"bus bandwidth, GB/s": bus, "time of a call, ms": _curves(report, lambda row: row.seconds_median * 1e3)}


def _curves(report: Report, of: Callable[[Row], float]) -> list[Curve]:
    names = list(dict.fromkeys(row.collective for row in report.rows if row.bytes))
    return [
        Curve(
            name=f"{name}, {transport}" if len(report.transports) > 1 else name,
            colour=colour % (len(_COLOURS) - 1),
            dash=dash % len(_DASHES),
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
    panels = _panels(report)
    height = (_HEIGHT + _TOP + _BOTTOM) * len(panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" role="img">',
        f"<title>{escape(_title(report))}</title>",
        '<style>text { font: 12px system-ui, "DejaVu Sans", sans-serif; fill: #1f2328; }</style>',
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    for number, (name, curves) in enumerate(panels.items()):
        top = number * (_HEIGHT + _TOP + _BOTTOM) + _TOP
        parts += _panel(f"{_title(report)}: {name}", curves, top)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(title: str, curves: Sequence[Curve], top: float) -> list[str]:
    points = [point for curve in curves for point in curve.points]
    if not points:
        return [_text(_LEFT, top, f"{title}: nothing was measured")]
    across = _Axis.over([x for x, _ in points], 2, _LEFT, _WIDTH - _RIGHT)
    up = _Axis.over([y for _, y in points], 10, top + _HEIGHT, top)
    parts = [_text(_LEFT, top - 16, title)]
    for value in across.ticks(step=2):
        x = across.at(value)
        parts.append(_line(x, top, x, top + _HEIGHT, "#e3e8ed"))
        parts.append(_text(x, top + _HEIGHT + 18, size_in_words(value), anchor="middle"))
    for value in up.ticks(step=1):
        y = up.at(value)
        parts.append(_line(_LEFT, y, _WIDTH - _RIGHT, y, "#e3e8ed"))
        parts.append(_text(_LEFT - 8, y + 4, f"{value:g}", anchor="end"))
    for number, curve in enumerate(curves):
        colour, dash = _COLOURS[curve.colour], _DASHES[curve.dash]
        path = " ".join(f"{across.at(x):.1f},{up.at(y):.1f}" for x, y in curve.points)
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8" stroke-dasharray="{dash}"/>'
        )
        y = top + 8 + 18 * number
        parts.append(_line(_WIDTH - _RIGHT + 12, y, _WIDTH - _RIGHT + 42, y, colour, dash))
        parts.append(_text(_WIDTH - _RIGHT + 50, y + 4, curve.name))
    return parts


@dataclass(frozen=True, kw_only=True)
class _Axis:
    """Where values lie between two ends of a picture, on a logarithmic axis of whole powers."""

    base: int
    lowest: int  # powers of the base
    highest: int
    start: float  # pixels
    end: float

    @classmethod
    def over(cls, values: Sequence[float], base: int, start: float, end: float) -> "_Axis":
        positive = [value for value in values if value > 0] or [1.0]
        lowest = math.floor(math.log(min(positive), base) + 1e-9)
        highest = max(lowest + 1, math.ceil(math.log(max(positive), base) - 1e-9))
        return cls(base=base, lowest=lowest, highest=highest, start=start, end=end)

    def at(self, value: float) -> float:
        power = math.log(value, self.base) if value > 0 else self.lowest
        return self.start + (power - self.lowest) / (self.highest - self.lowest) * (self.end - self.start)

    def ticks(self, step: int) -> list[float]:
        return [float(self.base) ** power for power in range(self.lowest, self.highest + 1, step)]


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, dash: str = "") -> str:
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="{colour}" stroke-dasharray="{dash}"/>'


def _text(x: float, y: float, words: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _html(report: Report) -> str:
    """The picture as one page that needs nothing from elsewhere, with plotly's program in it."""
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    panels = _panels(report)
    figure = make_subplots(rows=len(panels), cols=1, subplot_titles=list(panels), vertical_spacing=0.1)
    for number, curves in enumerate(panels.values(), start=1):
        for curve in curves:
            x, y = zip(*curve.points, strict=True)
            looks: dict[str, Any] = {"color": _COLOURS[curve.colour], "dash": _PLOTLY_DASHES[curve.dash]}
            trace = go.Scatter(x=x, y=y, name=curve.name, legendgroup=curve.name, line=looks, showlegend=number == 1)
            figure.add_trace(trace, row=number, col=1)
    figure.update_xaxes(type="log", title_text="bytes")
    figure.update_yaxes(type="log")
    figure.update_layout(title_text=_title(report), height=1000, template="plotly_white")
    return figure.to_html(include_plotlyjs=True, full_html=True)
