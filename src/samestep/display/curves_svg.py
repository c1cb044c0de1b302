"""Curves as a picture: panels one above the other, each with its axes and a list of names, as SVG."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

# Okabe and Ito's colours and three more, which people who see few colours tell apart.
COLOURS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#7a6a00", "#5c6670")
DASHES = ("", "6 4", "2 3", "9 3 2 3")
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 900, 360, 80, 230, 44, 50


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One curve of a plot."""

    name: str
    colour: int
    dash: int
    points: Sequence[tuple[float, float]]  # x and y


def number_in_words(value: float) -> str:
    return f"{value:g}"


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Linear or logarithmic scale of an axis."""

    base: int | None  # base of a logarithmic axis; None: linear
    step: int = 1  # powers between ticks
    in_words: Callable[[float], str] = number_in_words


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Curves over each other."""

    title: str
    curves: Sequence[Curve]
    across: Scale
    up: Scale


def svg(title: str, panels: Sequence[Panel]) -> str:
    """The picture; `title` is what a screen reader says of it."""
    height = (_HEIGHT + _TOP + _BOTTOM) * len(panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" role="img">',
        f"<title>{escape(title)}</title>",
        '<style>text { font: 12px system-ui, "DejaVu Sans", sans-serif; fill: #1f2328; }</style>',
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    for number, panel in enumerate(panels):
        parts += _panel(panel, number * (_HEIGHT + _TOP + _BOTTOM) + _TOP)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(panel: Panel, top: float) -> list[str]:
    """One panel whose upper edge is at `top` (pixels): axes, curves, their names next to it."""
    points = [point for curve in panel.curves for point in curve.points]
    if not points:
        return [text_at(_LEFT, top, f"{panel.title}: nothing was measured")]
    across = _Axis.over([x for x, _ in points], panel.across, _LEFT, _WIDTH - _RIGHT)
    up = _Axis.over([y for _, y in points], panel.up, top + _HEIGHT, top)
    parts = [text_at(_LEFT, top - 16, panel.title)]
    for value in across.marks():
        x = across.at(value)
        parts.append(_line(x, top, x, top + _HEIGHT, "#e3e8ed"))
        parts.append(text_at(x, top + _HEIGHT + 18, panel.across.in_words(value), anchor="middle"))
    for value in up.marks():
        y = up.at(value)
        parts.append(_line(_LEFT, y, _WIDTH - _RIGHT, y, "#e3e8ed"))
        parts.append(text_at(_LEFT - 8, y + 4, panel.up.in_words(value), anchor="end"))
    for number, curve in enumerate(panel.curves):
        colour, dash = COLOURS[curve.colour], DASHES[curve.dash]
        path = " ".join(f"{across.at(x):.1f},{up.at(y):.1f}" for x, y in curve.points)
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8" stroke-dasharray="{dash}"/>'
        )
        y = top + 8 + 18 * number
        parts.append(_line(_WIDTH - _RIGHT + 12, y, _WIDTH - _RIGHT + 42, y, colour, dash))
        parts.append(text_at(_WIDTH - _RIGHT + 50, y + 4, curve.name))
    return parts


@dataclass(frozen=True, kw_only=True)
class _Axis:
    """Maps values to pixels."""

    scale: Scale
    lowest: float  # a value, or on a logarithmic axis a power of the base
    highest: float
    mark: float  # between ticks, in values or powers
    start: float  # pixels
    end: float

    @classmethod
    def over(cls, values: Sequence[float], scale: Scale, start: float, end: float) -> "_Axis":
        """An axis over some values, from pixel `start` to `end`: round marks, or powers of the scale's base."""
        if scale.base is None:
            mark = _round_step(max(values) - min(values))
            lowest = mark * math.floor(min(values) / mark + 1e-9)
            highest = max(lowest + mark, mark * math.ceil(max(values) / mark - 1e-9))
            return cls(scale=scale, lowest=lowest, highest=highest, mark=mark, start=start, end=end)
        positive = [value for value in values if value > 0] or [1.0]
        lowest = math.floor(math.log(min(positive), scale.base) + 1e-9)
        highest = max(lowest + 1, math.ceil(math.log(max(positive), scale.base) - 1e-9))
        return cls(scale=scale, lowest=lowest, highest=highest, mark=scale.step, start=start, end=end)

    def at(self, value: float) -> float:
        """Return a value's position in pixels; on a logarithmic axis values <= 0 are at the lower end."""
        place = value
        if self.scale.base is not None:
            place = math.log(value, self.scale.base) if value > 0 else self.lowest
        return self.start + (place - self.lowest) / (self.highest - self.lowest) * (self.end - self.start)

    def marks(self) -> list[float]:
        """The values that are marked."""
        count = int((self.highest - self.lowest) / self.mark + 1e-9) + 1
        places = [self.lowest + self.mark * number for number in range(count)]
        return places if self.scale.base is None else [float(self.scale.base) ** place for place in places]


def _round_step(span: float) -> float:
    """About a sixth of a span: 1, 2 or 5 times a power of ten."""
    if span <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(span / 6))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= span / 6)


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, dash: str = "") -> str:
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="{colour}" stroke-dasharray="{dash}"/>'


def text_at(x: float, y: float, words: str, anchor: str = "start") -> str:
    """An SVG text at a point, in the font of its picture. `anchor`: start, middle or end."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'
