"""A picture of a pipeline's schedule, as it ran and as it would be ideally: a row a rank, a box an action."""

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from samestep.run_folder import SCHEDULE_FILE

PICTURE_FILE = "schedule.svg"

_WIDTH, _LEFT, _RIGHT = 1200, 90, 20
_ROW, _GAP = 34, 8
_COLOURS = {"F": "#5b8ff9", "B": "#f6903d", "I": "#f7c244", "W": "#61b58f"}
_NAMES = {"F": "forward", "B": "backward", "I": "backward, inputs", "W": "backward, weights"}
_IDLE = "#eceff3"
_SOURCES = {
    "gpipe": "Huang et al. 2019",
    "1f1b": "Narayanan et al. 2021",
    "interleaved-1f1b": "Narayanan et al. 2021",
    "interleaved-zero-bubble": "Qi et al. 2023",
    "zbv-zero-bubble": "Qi et al. 2023",
}

Ranks = Sequence[Sequence[Mapping[str, Any]]]


def draw_schedule(folder: Path) -> None:
    """Draw a run's schedule.json as schedule.svg next to it."""
    values = json.loads((folder / SCHEDULE_FILE).read_text(encoding="utf-8"))
    (folder / PICTURE_FILE).write_text(schedule_svg(values), encoding="utf-8")


def schedule_svg(values: Mapping[str, Any]) -> str:
    """The picture of a recorded schedule."""
    ranks: Ranks = values["ranks"]
    seconds = max(span["end"] for rank in ranks for span in rank)
    idle = values["bubble"]
    panel = len(ranks) * (_ROW + _GAP)
    counts = f"{values['schedule']}, {values['stages']} stages, {values['micro_batches']} micro-batches"
    title = f"{values['layout']}: {counts}"
    parts = [
        _text(_LEFT, 28, title, size=18, weight="bold"),
        *_legend(values),
        _text(
            _LEFT,
            92,
            f"step {values['step']} as it ran, {_milliseconds(seconds)}: idle {idle['measured']:.1%}",
            size=14,
        ),
        *_panel(ranks, top=104),
        *_axis(seconds, top=104 + panel),
    ]
    second = 104 + panel + 62
    ideal = (
        f"as it would be with equal stages, messages in no time, backward = 2 x forward: idle {idle['ideal']:.1%}; "
        f"formula {idle['formula']:.1%} ({_SOURCES[values['schedule']]})"
    )
    parts += [_text(_LEFT, second - 12, ideal, size=14), *_panel(values["ideal_ranks"], top=second)]
    height = second + panel + 12
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
            f'width="{_WIDTH}" height="{height}" font-family="Helvetica, Arial, sans-serif">',
            f"<title>{escape(title)}</title>",
            f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
            *parts,
            "</svg>\n",
        ]
    )


def _legend(values: Mapping[str, Any]) -> list[str]:
    """What the colours mean, of kinds that occur."""
    kinds = {span["kind"] for name in ("ranks", "ideal_ranks") for rank in values[name] for span in rank}
    entries = [(_COLOURS[kind], _NAMES[kind]) for kind in _COLOURS if kind in kinds] + [(_IDLE, "idle")]
    parts, x = [], _LEFT
    for colour, name in entries:
        parts.append(f'<rect x="{x}" y="44" width="16" height="16" rx="2" fill="{colour}"/>')
        parts.append(_text(x + 22, 57, name, size=13))
        x += 22 + 8 * len(name) + 22
    several = values["stages"] > len(values["ranks"])
    numbers = "numbers: micro-batches" + ("; darker: a rank's later stages" if several else "")
    return [*parts, _text(x, 57, numbers, size=13, colour="#667")]


def _panel(ranks: Ranks, *, top: int) -> list[str]:
    """Draw a row for each rank, scaled so that the longest fills the width."""
    total = max(span["end"] for rank in ranks for span in rank)
    scale = (_WIDTH - _LEFT - _RIGHT) / total
    parts = []
    for number, spans in enumerate(ranks):
        y = top + number * (_ROW + _GAP)
        held = sorted({span["stage"] for span in spans})
        parts.append(_text(_LEFT - 12, y + _ROW / 2 + 5, f"rank {number}", size=14, anchor="end"))
        parts.append(f'<rect x="{_LEFT}" y="{y}" width="{total * scale:.2f}" height="{_ROW}" fill="{_IDLE}"/>')
        parts += [_box(span, y, scale, held.index(span["stage"])) for span in spans]
    return parts


def _box(span: Mapping[str, Any], y: int, scale: float, later: int) -> str:
    """Draw an action from start to end; later stages of a rank are darker."""
    x, width = _LEFT + span["start"] * scale, (span["end"] - span["start"]) * scale
    about = f"{_NAMES[span['kind']]}, stage {span['stage']}, micro-batch {span['micro_batch']}"
    place = f'x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_ROW}"'
    parts = [
        f"<title>{about}</title>",
        f'<rect {place} fill="{_COLOURS[span["kind"]]}" stroke="white" stroke-width="0.8"/>',
    ]
    if later:
        parts.append(f'<rect {place} fill="black" opacity="{min(0.22 * later, 0.6):.2f}"/>')
    label = str(span["micro_batch"])
    if width > 7 * len(label) + 4:
        colour = "white" if later else "#1b2430"
        parts.append(_text(x + width / 2, y + _ROW / 2 + 4.5, label, size=12, anchor="middle", colour=colour))
    return f"<g>{''.join(parts)}</g>"


def _axis(seconds: float, *, top: int) -> list[str]:
    """Five marks of time below the rows."""
    parts = []
    for mark in range(5):
        x = _LEFT + (_WIDTH - _LEFT - _RIGHT) * mark / 4
        anchor = "start" if mark == 0 else "end" if mark == 4 else "middle"
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top - _GAP}" y2="{top - 2}" stroke="#99a"/>')
        parts.append(_text(x, top + 12, _milliseconds(seconds * mark / 4), size=12, anchor=anchor, colour="#667"))
    return parts


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _text(
    x: float,
    y: float,
    text: str,
    *,
    size: int,
    weight: str = "normal",
    anchor: str = "start",
    colour: str = "#1b2430",
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}" '
        f'fill="{colour}">{escape(text)}</text>'
    )
