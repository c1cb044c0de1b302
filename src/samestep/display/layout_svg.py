"""A picture of a layout: a column a rank with what it takes, computes and keeps, and below which ranks communicate.

A colour stands for a mesh axis everywhere: of its coordinates, of the cuts it makes, of its groups. `Drawing` has the
few shapes of SVG that the picture needs.
"""

import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass

from samestep.display.layout import STATES, AxisGroups, Holding, LayoutHoldings, sample_words, share_words, words
from samestep.errors import UserError

LARGEST = 64  # most ranks side by side in a picture

_LEFT = 176  # width of the names of the rows

_RIGHT = 24

_TALL = 66  # height of the batch and of the model

_FINE = 5  # minimum cell size in pixels at which cuts are drawn

# Light, dark.
_COLORS = {
    "pipeline": ("#bc4c00", "#f0883e"),
    "replicate": ("#0969da", "#58a6ff"),
    "shard": ("#1a7f37", "#3fb950"),
    "expert": ("#9a6700", "#d29922"),
    "context": ("#bf3989", "#f778ba"),
    "tensor": ("#8250df", "#bc8cff"),
}


class Drawing:
    """An SVG drawing; lengths are in pixels, and colours come from the style sheet's classes."""

    def __init__(self, style: str) -> None:
        self._root = ElementTree.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", "role": "img"})
        self._title = ElementTree.SubElement(self._root, "title")
        ElementTree.SubElement(self._root, "style").text = style
        self._background = ElementTree.SubElement(self._root, "rect", {"class": "paper", "rx": "8"})

    def rect(self, kind: str, x: float, y: float, width: float, height: float, radius: float = 0) -> None:
        sizes = {"x": x, "y": y, "width": width, "height": height} | ({"rx": radius} if radius else {})
        self._add("rect", kind, sizes)

    def line(self, kind: str, x1: float, y1: float, x2: float, y2: float) -> None:
        self._add("line", kind, {"x1": x1, "y1": y1, "x2": x2, "y2": y2})

    def dot(self, kind: str, x: float, y: float, radius: float) -> None:
        self._add("circle", kind, {"cx": x, "cy": y, "r": radius})

    def text(self, kind: str, x: float, y: float, words: str) -> None:
        self._add("text", kind, {"x": x, "y": y}).text = words

    def finish(self, title: str, width: float, height: float) -> str:
        """The text of the file; `title` is for screen readers, sizes are in pixels."""
        self._title.text = title
        sizes = {"width": _number(width), "height": _number(height)}
        self._background.attrib.update(sizes)
        self._root.attrib.update(sizes, viewBox=f"0 0 {_number(width)} {_number(height)}")
        ElementTree.indent(self._root)
        return ElementTree.tostring(self._root, encoding="unicode") + "\n"

    def _add(self, tag: str, kind: str, sizes: dict[str, float]) -> ElementTree.Element:
        """Append a shape with its class and its lengths."""
        attributes = {"class": kind} | {name: _number(value) for name, value in sizes.items()}
        return ElementTree.SubElement(self._root, tag, attributes)


def _number(value: float) -> str:
    """A length in pixels without the zeros at its end."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def draw(shown: LayoutHoldings) -> str:
    """The picture as SVG text. Raises UserError where there are too many ranks to stand next to each other."""
    layout = shown.layout
    if layout.size > LARGEST:
        raise UserError(
            f'layout "{layout}": {layout.size} ranks are too many for a picture; use a layout of the same kind with '
            f"{LARGEST} ranks or fewer"
        )
    columns = _Columns(ranks=layout.size)
    drawing = Drawing(_style([name for name in _COLORS if name != "expert" or layout.expert > 1]))
    y = _heading(drawing, shown)
    y = _ranks(drawing, shown, columns, y)
    y = _batch(drawing, shown, columns, y)
    y = _model(drawing, shown, columns, y)
    y = _state(drawing, shown, columns, y)
    y = _legend(drawing, shown, y)
    if shown.groups:
        y = _talks(drawing, shown, columns, y)
    return drawing.finish(f"Who holds what under the layout {layout}", columns.picture_width, y)


@dataclass(frozen=True, kw_only=True)
class _Columns:
    """Where the columns of the ranks stand."""

    ranks: int

    @property
    def width(self) -> float:
        """Width of a column in pixels; columns are narrower for many ranks."""
        return min(max(800 / self.ranks, 100), 240)

    @property
    def box(self) -> float:
        """Width of a box in a column, in pixels."""
        return min(self.width - 20, 110)

    @property
    def picture_width(self) -> float:
        least = 800 if self.ranks > 1 else 440  # what is sent must fit below the lines
        return max(_LEFT + self.ranks * self.width + _RIGHT, least)

    def middle(self, rank: float) -> float:
        """Return the centre of a rank's column, in pixels from the left; half ranks are between columns."""
        return _LEFT + (rank + 0.5) * self.width

    def left(self, rank: int) -> float:
        """The left edge of a rank's box, in pixels."""
        return self.middle(rank) - self.box / 2


def _heading(drawing: Drawing, shown: LayoutHoldings) -> float:
    """The layout's text, its ranks as a product of the mesh axes, and the batch; returns the height that is used."""
    layout = shown.layout
    drawing.text("layout", 20, 36, str(layout))
    ranks = f"{layout.size} rank{'' if layout.size == 1 else 's'}"
    sizes = " × ".join(f"{name} {getattr(layout, name)}" for name in layout.split_axes())
    batch = f"; a global batch of {shown.batch} samples" if shown.batch else ""
    drawing.text("quiet", 20, 56, f"{ranks}{' = ' if sizes else ''}{sizes}{batch}")
    return 84


def _ranks(drawing: Drawing, shown: LayoutHoldings, columns: _Columns, y: float) -> float:
    """The coordinates as brackets over the ranks, outermost axis on top, and the ranks' numbers."""
    for name in shown.layout.split_axes():
        drawing.text(f"name {name}", 20, y + 4, name)
        start = 0
        for rank in range(1, len(shown.ranks) + 1):
            place = shown.ranks[start].coordinates
            if rank < len(shown.ranks) and shown.ranks[rank].coordinates[name] == place[name]:
                continue
            x1, x2 = columns.middle(start) - columns.box / 2, columns.middle(rank - 1) + columns.box / 2
            drawing.text(f"middle {name}", (x1 + x2) / 2, y + 2, str(place[name]))
            drawing.line(f"bracket {name}", x1, y + 8, x2, y + 8)
            start = rank
        y += 26
    for holding in shown.ranks:
        drawing.text("rank", columns.middle(holding.rank), y + 12, f"rank {holding.rank}")
    return y + 30


def _batch(drawing: Drawing, shown: LayoutHoldings, columns: _Columns, y: float) -> float:
    """Draw the global batch, samples downwards and tokens across, cut by replicate, shard and context."""
    layout = shown.layout
    _name(drawing, y, "takes", "of the global batch:", "samples down,", "tokens across")
    rows = [
        "expert" if row % layout.expert else "shard" if row % (layout.expert * layout.shard) else "replicate"
        for row in range(layout.data_ranks)
    ]
    for holding in shown.ranks:
        own = [(holding.samples.index, holding.tokens.index)]
        grid = _Grid(rows=rows, columns=["context"] * layout.context, own=own)
        _draw_grid(drawing, grid, columns.left(holding.rank), y, columns.box, _TALL)
    y = _words(drawing, columns, y + _TALL + 16, "samples", [sample_words(holding) for holding in shown.ranks])
    if layout.context > 1:
        y = _words(drawing, columns, y, "tokens", [words(holding.tokens) for holding in shown.ranks])
    return y + 10


def _model(drawing: Drawing, shown: LayoutHoldings, columns: _Columns, y: float) -> float:
    """Draw the model, layers downwards and heads across, cut by pipeline and tensor."""
    layout = shown.layout
    _name(drawing, y, "computes", "of the model:", "layers down,", "heads, columns across")
    for holding in shown.ranks:
        own = [(stage, holding.matrices.index) for stage in holding.stages]
        grid = _Grid(rows=["pipeline"] * shown.stages, columns=["tensor"] * layout.tensor, own=own)
        _draw_grid(drawing, grid, columns.left(holding.rank), y, columns.box, _TALL)
    y += _TALL + 16
    if shown.stages > 1:
        y = _words(drawing, columns, y, "stages", [_stages(holding) for holding in shown.ranks])
    else:
        y = _words(drawing, columns, y, "layers", ["all"] * layout.size)
    if layout.tensor > 1:
        y = _words(drawing, columns, y, "slice of each", [words(holding.matrices) for holding in shown.ranks])
    if layout.expert > 1:
        y = _words(drawing, columns, y, "experts", [words(holding.experts) for holding in shown.ranks])
    return y + 10


def _stages(holding: Holding) -> str:
    listed = ", ".join(map(str, holding.stages))
    return listed if len(listed) < 15 else f"{len(holding.stages)} stages"


def _state(drawing: Drawing, shown: LayoutHoldings, columns: _Columns, y: float) -> float:
    """Draw the whole model's state as bars, filled where the rank keeps it."""
    layout = shown.layout
    _name(drawing, y, "keeps")
    drawing.text("quiet", 68, y + 12, "of the model's")
    y += 22
    shards = max(holding.kept["optimizer state"].of for holding in shown.ranks)
    cuts = [
        "shard" if cell % shards else "tensor" if cell % (shards * layout.tensor) else "pipeline"
        for cell in range(shown.stages * layout.tensor * shards)
    ]
    for state in STATES:
        drawing.text("quiet", 20, y + 10, state)
        for holding in shown.ranks:
            kept = holding.kept[state]
            computed = [
                (stage * layout.tensor + holding.matrices.index) * shards + shard
                for stage in holding.stages
                for shard in range(shards)
            ]
            gathered = computed if state == "parameters" and shown.parameters_stay_gathered else []
            own_shard = holding.kept["optimizer state"].index
            own_shards = {own_shard} if gathered or kept.of > 1 else set(range(shards))
            own = [cell for cell in computed if cell % shards in own_shards]
            grid = _Grid(
                rows=["pipeline"], columns=cuts, own=[(0, cell) for cell in own], gathered=[(0, c) for c in gathered]
            )
            x = columns.left(holding.rank)
            _draw_grid(drawing, grid, x, y, columns.box - 28, 13)
            drawing.text("end", x + columns.box, y + 11, share_words(shown.share(holding, state)))
        y += 21
    return y + 12


@dataclass(frozen=True, kw_only=True)
class _Grid:
    """A box divided into cells, with the mesh axis of the cut before each row and each column."""

    rows: Sequence[str]
    columns: Sequence[str]
    own: Sequence[tuple[int, int]]  # cells that the rank keeps
    gathered: Sequence[tuple[int, int]] = ()  # cells that it has temporarily


def _draw_grid(drawing: Drawing, grid: _Grid, x: float, y: float, width: float, height: float) -> None:
    """Draw the cells of a box, the rank's own filled; cuts are drawn only between cells that are large enough."""
    tall, wide = height / len(grid.rows), width / len(grid.columns)
    drawing.rect("empty", x, y, width, height)
    for kind, cells in (("gathered", grid.gathered), ("own", grid.own)):
        for row, column in cells:
            drawing.rect(kind, x + column * wide, y + row * tall, wide, tall)
    if tall >= _FINE:
        for row, axis in list(enumerate(grid.rows))[1:]:
            drawing.line(f"cut {axis}", x, y + row * tall, x + width, y + row * tall)
    if wide >= _FINE:
        for column, axis in list(enumerate(grid.columns))[1:]:
            drawing.line(f"cut {axis}", x + column * wide, y, x + column * wide, y + height)
    drawing.rect("frame", x, y, width, height)


def _name(drawing: Drawing, y: float, verb: str, *lines: str) -> None:
    drawing.text("name", 20, y + 12, verb)
    for number, line in enumerate(lines, start=1):
        drawing.text("quiet", 20, y + 12 + number * 17, line)


def _words(drawing: Drawing, columns: _Columns, y: float, name: str, cells: Sequence[str]) -> float:
    """Draw a line of text below the boxes: a label, and a cell for each rank. Returns the next y."""
    drawing.text("quiet", 20, y, name)
    for rank, cell in enumerate(cells):
        drawing.text("middle", columns.middle(rank), y, cell)
    return y + 17


def _legend(drawing: Drawing, shown: LayoutHoldings, y: float) -> float:
    """Draw the legend of the fills; returns the y below it."""
    entries = [("own", "this rank's")]
    if len(shown.ranks) > 1:
        entries.append(("empty", "other ranks'"))
    if shown.parameters_stay_gathered:
        entries.append(("gathered", "other ranks', gathered in forward and given up after backward"))
    x = _LEFT
    for kind, meaning in entries:
        drawing.rect(kind, x, y, 14, 11)
        drawing.rect("frame", x, y, 14, 11)
        drawing.text("quiet", x + 20, y + 10, meaning)
        x += 46 + 6.4 * len(meaning)
    return y + 36


def _talks(drawing: Drawing, shown: LayoutHoldings, columns: _Columns, y: float) -> float:
    """Draw the exchanges of each mesh axis, and a line through the ranks of each group; returns the y below."""
    drawing.line("rule", 20, y - 10, columns.picture_width - 20, y - 10)
    drawing.text("name", 20, y + 14, "talks")
    drawing.text("quiet", _LEFT, y + 14, "ranks on one line send each other:")
    y += 34
    for groups in shown.groups:
        drawing.text(f"name {groups.axis}", 20, y + 12, groups.axis)
        levels = _levels(groups)
        for ranks, level in zip(groups.ranks, levels, strict=True):
            line = y + 8 + level * 12
            drawing.line(f"link {groups.axis}", columns.middle(ranks[0]), line, columns.middle(ranks[-1]), line)
            for rank in ranks:
                drawing.dot(f"dot {groups.axis}", columns.middle(rank), line, 4.5)
        y += 12 * max(levels) + 32
        for exchange in groups.exchanges:
            drawing.text("quiet", _LEFT, y, str(exchange))
            y += 17
        y += 10
    return y - 4


def _levels(groups: AxisGroups) -> list[int]:
    """Assign a level to each group's line, so that lines don't overlap."""
    ends: list[int] = []  # the last rank on each level
    levels = []
    for ranks in groups.ranks:
        free = [level for level, end in enumerate(ends) if end < ranks[0]]
        level = free[0] if free else len(ends)
        ends[level : level + 1] = [ranks[-1]]
        levels.append(level)
    return levels


def _style(axes: Sequence[str]) -> str:
    """Build the style sheet; colours follow the reader's light or dark theme."""
    shapes = """
text { font: 12px system-ui, "Segoe UI", "Helvetica Neue", "Noto Sans", "DejaVu Sans", sans-serif; }
.layout { font-size: 20px; font-weight: 600; }
.name, .rank { font-weight: 600; }
.rank { font-size: 14px; text-anchor: middle; }
.middle { text-anchor: middle; }
.end { text-anchor: end; }
.frame { fill: none; }
.bracket, .cut { stroke-width: 2; }
.link { stroke-width: 2.5; }
"""
    plain = (
        {"text": "#1f2328", "quiet": "#59636e", "paper": "#ffffff", "empty": "#eceff2", "frame": "#afb8c1"}
        | {"own": "#566882", "gathered": "#b6bec7"},
        {"text": "#f0f6fc", "quiet": "#9198a1", "paper": "#0d1117", "empty": "#21262d", "frame": "#484f58"}
        | {"own": "#c9d1d9", "gathered": "#6e7681"},
    )
    light, dark = (_palette(colors, theme, axes) for theme, colors in enumerate(plain))
    return f"{shapes}{light}@media (prefers-color-scheme: dark) {{\n{dark}}}\n"


def _palette(colors: dict[str, str], theme: int, axes: Sequence[str]) -> str:
    """Styles of one theme."""
    lines = [f"text {{ fill: {colors['text']}; }}", f".quiet {{ fill: {colors['quiet']}; }}"]
    lines += [f".{kind} {{ fill: {colors[kind]}; }}" for kind in ("paper", "empty", "own", "gathered")]
    lines += [f".frame, .rule {{ stroke: {colors['frame']}; }}"]
    for name in axes:
        pair = _COLORS[name]
        lines += [
            f"text.{name}, circle.{name} {{ fill: {pair[theme]}; }}",
            f"line.{name} {{ stroke: {pair[theme]}; }}",
        ]
    return "\n".join(lines) + "\n"
