"""A plan as one page of HTML that fetches nothing: ranked layouts, memory, the timeline of a step, scaling, cost."""

from collections.abc import Sequence
from html import escape
from math import log2

from samestep.display.columns import page_cells, page_columns
from samestep.display.curves_svg import text_at
from samestep.display.page import html_table, plain_document
from samestep.display.plan import layout_columns
from samestep.errors import UserError
from samestep.planning.memory import RankMemory
from samestep.planning.pipeline_events import Event, timeline
from samestep.planning.price import Price
from samestep.planning.search import ClusterPlan, plan

# Okabe and Ito's colours, which people who see few colours tell apart.
_PARTS = {
    "parameters": ("#0072b2", "parameters 参数"),
    "gradients": ("#56b4e9", "gradients 梯度"),
    "optimizer": ("#009e73", "optimizer state 优化器状态"),
    "activations": ("#e69f00", "activations 激活值"),
    "buffers": ("#999999", "buffers 缓冲区"),
}
_CAUSES = ("#0072b2", "#56b4e9", "#009e73", "#e69f00", "#d55e00", "#cc79a7", "#999999", "#f0e442", "#000000")
_KINDS = {"F": ("#56b4e9", "forward 前向"), "B": ("#0072b2", "backward 反向")}
_WIDTH, _LEFT = 960, 150
_ROW = 22
_MOST_RANKS = 64  # most ranks drawn
_SHOWN_ROUNDS = 4  # micro-batches a pipeline rank in the timeline
_STYLE = """
svg { max-width: 100%; height: auto } svg text { font: 12px system-ui, sans-serif; fill: currentColor }
.key span { display: inline-block; margin-right: 1.2em }
.key i { display: inline-block; width: .8em; height: .8em; margin-right: .35em }
"""


def page(cluster_plan: ClusterPlan, price: Price | None) -> str:
    """The whole page."""
    job, cluster = cluster_plan.job, cluster_plan.cluster
    title = f"{job.model.name}, {cluster.devices:,} x {cluster.device.name}"
    sections = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{job.global_batch:,} samples of {job.model.seq:,} tokens a step, {escape(job.precision)}, "
        f"{job.model.parameters / 1e9:.2f} billion parameters; {cluster_plan.tried:,} layouts tried, "
        f"{cluster_plan.too_large:,} do not fit. Times are predicted. 时间均为预测值。</p>",
        "<h2>Layouts 布局</h2>",
        _layouts(cluster_plan, price),
        f"<h2>Where a step goes 一步的时间去向: {escape(str(cluster_plan.best.layout))}</h2>",
        _causes(cluster_plan),
        "<h2>Memory of each pipeline rank 各流水线段的显存</h2>",
        _key(list(_PARTS.values())),
        _memory(cluster_plan.best.memory, cluster.device.memory),
        "<h2>Timeline of a step 一步的时间线</h2>",
        _timeline(cluster_plan),
        "<h2>Scaling 扩展</h2>",
        _scaling(cluster_plan),
    ]
    return plain_document(title, sections, _STYLE)


def _layouts(cluster_plan: ClusterPlan, price: Price | None) -> str:
    """The table of candidates: GB, seconds, tokens a second, utilisation (MFU), energy and money."""
    columns = layout_columns(cluster_plan, price)
    rows = [page_cells(columns, candidate) for candidate in cluster_plan.candidates]
    return html_table("layouts", page_columns(columns), rows)


def _key(entries: Sequence[tuple[str, str]]) -> str:
    return (
        '<p class="key">'
        + "".join(f'<span><i style="background:{colour}"></i>{escape(name)}</span>' for colour, name in entries)
        + "</p>"
    )


def _causes(cluster_plan: ClusterPlan) -> str:
    """Draw one bar of a step, divided by cause."""
    parts = sorted(cluster_plan.best.time.parts.items(), key=lambda part: -part[1])
    at, bars = 0.0, []
    scale = _WIDTH / cluster_plan.best.time.seconds
    for (name, seconds), colour in zip(parts, _CAUSES, strict=False):
        text = f"{name}: {seconds:.3g} s"
        bars.append(_bar(at, 0, seconds * scale, 30, colour, text))
        at += seconds * scale
    entries = [
        (colour, f"{name} {seconds / cluster_plan.best.time.seconds:.0%}")
        for (name, seconds), colour in zip(parts, _CAUSES, strict=False)
    ]
    return _key(entries) + _svg("causes", 30, bars)


def _memory(ranks: Sequence[RankMemory], limit: float) -> str:
    """A stacked bar for each pipeline rank, and the device's memory as a line."""
    most = max([limit, *(rank.total for rank in ranks)]) * 1.05
    scale = (_WIDTH - _LEFT) / most
    marks = []
    for index, rank in enumerate(ranks[:_MOST_RANKS]):
        top = index * _ROW
        marks.append(text_at(_LEFT - 8, top + 14, f"rank {index}: {rank.total / 1e9:.1f} GB", "end"))
        at = float(_LEFT)
        for part, (colour, name) in _PARTS.items():
            size = getattr(rank, part)
            marks.append(_bar(at, top, size * scale, _ROW - 6, colour, f"{name}: {size / 1e9:.2f} GB"))
            at += size * scale
    height = min(len(ranks), _MOST_RANKS) * _ROW + 20
    line = _LEFT + limit * scale
    marks.append(
        f'<line x1="{line:.1f}" x2="{line:.1f}" y1="0" y2="{height - 18}" stroke="#d55e00" stroke-width="2"/>'
    )
    marks.append(text_at(line - 6, height - 4, f"{limit / 1e9:.0f} GB", "end"))
    return _svg("memory", height, marks)


def _timeline(cluster_plan: ClusterPlan) -> str:
    """Draw the first rounds of the pipeline's schedule; without a pipeline, forward and backward of a micro-batch."""
    best = cluster_plan.best
    layout = best.layout
    if layout.pipeline == 1:
        stage = best.time.stages[0]
        events = [
            Event(rank=0, stage=0, kind="F", micro_batch=0, start=0.0, end=stage.forward),
            Event(rank=0, stage=0, kind="B", micro_batch=0, start=stage.forward, end=stage.forward + stage.backward),
        ]
        text = f"One of {best.time.micro_batches:,} micro-batches. 每步 {best.time.micro_batches:,} 个微批之一。"
    else:
        number = min(best.time.micro_batches, _SHOWN_ROUNDS * layout.pipeline)
        number = max(number // layout.pipeline, 1) * layout.pipeline
        events = timeline(layout, best.time.stages, number)
        text = f"{number} of {best.time.micro_batches:,} micro-batches. 所示为其中 {number} 个微批。"
    scale = (_WIDTH - _LEFT) / max(event.end for event in events)
    marks = []
    shown = min(layout.pipeline, _MOST_RANKS)
    for rank in range(shown):
        marks.append(text_at(_LEFT - 8, rank * _ROW + 14, f"rank {rank}", "end"))
    for event in events:
        if event.rank < shown:
            colour, name = _KINDS["F" if event.kind == "F" else "B"]
            words = f"{name}, stage {event.stage}, micro-batch {event.micro_batch}: {event.end - event.start:.3g} s"
            marks.append(
                _bar(
                    _LEFT + event.start * scale,
                    event.rank * _ROW,
                    (event.end - event.start) * scale,
                    _ROW - 6,
                    colour,
                    words,
                    edge=True,
                )
            )
    return f"<p>{text}</p>" + _key(list(_KINDS.values())) + _svg("timeline", shown * _ROW + 4, marks)


def _scaling(cluster_plan: ClusterPlan) -> str:
    """Plot tokens a second of the best layout for each power of two of devices, with linear scaling."""
    points: list[tuple[int, float]] = []
    devices = 1
    while devices < cluster_plan.cluster.devices:
        try:
            smaller = plan(cluster_plan.job, cluster_plan.cluster.resized(devices), most=1)
            points.append((devices, cluster_plan.job.tokens / smaller.best.time.seconds))
        except UserError:
            pass  # nothing fits on so few
        devices *= 2
    points.append((cluster_plan.cluster.devices, cluster_plan.job.tokens / cluster_plan.best.time.seconds))
    first = points[0]
    height, bottom, top = 300, 40, 30
    last = max(cluster_plan.cluster.devices.bit_length() - 1, 1)
    most = max(points[-1][1], first[1] * cluster_plan.cluster.devices / first[0])
    least = points[0][1] / 2

    def place(count: float, rate: float) -> tuple[float, float]:
        x = _LEFT + (_WIDTH - _LEFT - 40) * log2(count) / last
        return x, height - bottom - (height - bottom - top) * log2(rate / least) / log2(most / least)

    ideal = [place(*first), place(cluster_plan.cluster.devices, first[1] * cluster_plan.cluster.devices / first[0])]
    marks = [
        f'<polyline points="{_points(ideal)}" fill="none" stroke="#999999" stroke-dasharray="5 4"/>',
        f'<polyline points="{_points([place(*point) for point in points])}" fill="none" stroke="#0072b2" '
        'stroke-width="2"/>',
    ]
    for count, rate in points:
        x, y = place(count, rate)
        part = rate / count * first[0] / first[1]
        text = f"{count:,} devices: {rate:,.0f} tokens/s, {part:.0%} of linear"
        marks.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="#0072b2"><title>{text}</title></circle>')
        marks.append(text_at(x, height - bottom + 18, f"{count:,}", "middle"))
        marks.append(text_at(x - 6, y - 8, f"{rate:,.0f}", "end"))
    marks.append(text_at(_LEFT - 8, top, "tokens/s", "end"))
    text = "Both axes are logarithmic; dashed: linear scaling. 两轴均为对数；虚线为线性扩展。"
    return f"{_svg('scaling', height, marks)}<p>{text}</p>"


def _points(places: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in places)


def _svg(name: str, height: float, marks: Sequence[str]) -> str:
    return f'<svg id="{name}" viewBox="0 0 {_WIDTH} {height:.0f}" role="img">{"".join(marks)}</svg>'


def _bar(left: float, top: float, width: float, height: float, colour: str, text: str, *, edge: bool = False) -> str:
    stroke = ' stroke="#ffffff" stroke-width="0.5"' if edge else ""
    return (
        f'<rect x="{left:.2f}" y="{top:.1f}" width="{max(width, 0):.2f}" height="{height:.1f}" '
        f'fill="{colour}"{stroke}>'
        f"<title>{escape(text)}</title></rect>"
    )
