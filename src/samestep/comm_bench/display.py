"""What `samestep comm` has measured, shown and tried: tables in the terminal, and curves as a picture.

The picture has bus bandwidth and time over the size of a message: SVG drawn here, HTML by plotly.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from samestep.comm.correctness import DTYPES, short
from samestep.comm.demo import Demonstration
from samestep.comm.measure import CollectiveTiming
from samestep.comm_bench.results import BandwidthLimits, Check, Report
from samestep.comm_bench.support import Support
from samestep.display import curves_svg
from samestep.display.curves_svg import COLOURS, DASHES, Curve, Panel, Scale
from samestep.display.tables import Table, numbers, plain_console, table, texts
from samestep.errors import UserError
from samestep.extras import is_installed
from samestep.sizes import binary_size

_WIDTH = 132  # characters, where the output is not a terminal


def console() -> Console:
    """Standard output, as wide as the tables where it is a file or a pipe."""
    return plain_console(width=_WIDTH)


def print_report(report: Report, out: Console | None = None) -> None:
    """Print times with the limit, the fitted models, and wrong results."""
    out = out or console()
    out.print(_times(report))
    if report.fits:
        out.print(_fits(report))
    for line in limit_lines(report.limits):
        out.print(line, soft_wrap=True)
    for name, reason in report.missing.items():
        out.print(f"transport {name} is left out: {reason}", soft_wrap=True)
    for check in report.checks:
        if check.wrong:
            where = f"{check.collective} of {check.dtype} over {check.transport}"
            out.print(f"WRONG: {where}: {check.reason}", soft_wrap=True)
    out.print(checks_in_words(report.checks), soft_wrap=True)


def _times(report: Report) -> Table:
    """A row for each collective and size: times, bandwidths in GB/s, and the share of the limit."""
    hosts = len(set(report.hosts))
    where = f"{hosts} hosts" if hosts > 1 else "1 host"
    first = report.transports[0]
    several = len(report.transports) > 1
    figures = ["median", "10 % - 90 %", "algorithm", "bus", "limit", "of limit", *([f"x {first}"] if several else [])]
    columns = [
        *texts("collective", whole=True),
        *numbers("bytes", whole=True),
        *texts("transport", whole=True),
        *numbers(*figures, whole=True),
    ]
    base = {(row.collective, row.bytes): row.seconds_median for row in report.rows if row.transport == first}
    before = None
    rows = []
    for row in report.rows:
        limit, bus = report.limit(row), row.bus_bandwidth
        cells = [
            row.collective if before != row.collective else "",
            binary_size(row.bytes) if row.bytes else "",
            row.transport,
            seconds_in_words(row.seconds_median),
            f"{seconds_in_words(row.seconds_p10)} - {seconds_in_words(row.seconds_p90)}",
            rate_in_words(row.algorithm_bandwidth),
            rate_in_words(bus),
            rate_in_words(limit if bus is not None else None),
            _share(bus, limit) if bus is not None and limit else "",
        ]
        if several:
            base_seconds = base.get((row.collective, row.bytes))
            cells.append(f"{base_seconds / row.seconds_median:.2f}" if base_seconds is not None else "")
        rows.append(cells)
        before = row.collective
    return table(
        columns,
        rows,
        title=f"collectives on {len(report.hosts)} ranks of {where}: time of a call, bandwidths in GB/s",
        caption="algorithm bandwidth: bytes / median; bus bandwidth: as nccl-tests, compared with "
        + ("the link between hosts" if hosts > 1 else "memory copies of as many bytes by all ranks at once"),
        grouped=True,
    )


def _fits(report: Report) -> Table:
    """The fitted models: seconds = latency + bytes / bandwidth, of each collective and transport."""
    columns = [*texts("collective", "transport"), *numbers("latency", "bandwidth, GB/s", "farthest median from it")]
    rows = [
        [
            fit.collective,
            fit.transport,
            seconds_in_words(fit.latency),
            rate_in_words(fit.bandwidth),
            f"{fit.worst:.0%}",
        ]
        for fit in report.fits
    ]
    return table(columns, rows, title="fitted: time = latency + bytes / bandwidth")


def limit_lines(limits: BandwidthLimits) -> list[str]:
    """Describe the link between hosts in words; empty on one host."""
    if limits.interface is None and limits.stream is None:
        return []
    text = f"link between hosts: {limits.interface or 'interface not known'}"
    text += f", {limits.adapter / 1e9:.3f} GB/s by its driver" if limits.adapter else ", no rate by its driver"
    stream = f"{limits.stream / 1e9:.3f} GB/s" if limits.stream else "not measured"
    return [f"{text}; one TCP stream: {stream}"]


def checks_in_words(checks: Sequence[Check]) -> str:
    """How many results were right, wrong, or refused by the back end."""
    right, wrong = sum(check.reason is None for check in checks), sum(check.wrong for check in checks)
    refused = len(checks) - right - wrong
    return f"results: {right} right, {wrong} wrong, {refused} refused by the back end (`samestep comm support`)"


def print_demonstration(shown: Demonstration, out: Console | None = None) -> None:
    """Print each rank's tensor before and after a collective, the transport that carried it, and a summary."""
    out = out or console()
    left = "" if shown.carrier == shown.transport else f", which leaves it to {shown.carrier}"
    out.print(f"{shown.collective} over {shown.transport}{left}", soft_wrap=True)
    rows = [
        [str(rank), _numbers(before), "not defined" if rank in shown.undefined else _numbers(after)]
        for rank, (before, after) in enumerate(zip(shown.before, shown.after, strict=True))
    ]
    out.print(table([*numbers("rank"), *texts("before", "after")], rows))
    out.print(shown.summary, soft_wrap=True)


def _numbers(values: Sequence[int]) -> str:
    return " ".join(map(str, values)) or "-"


def print_support(support: Support, out: Console | None = None) -> None:
    """Print a table for each back end and device, then the transports left out and the reasons of failures."""
    out = out or console()
    for (transport, device), rows in support.tables().items():
        out.print(_support_table(f"{transport} with tensors on {device}, tried on {support.ranks} ranks", rows))
    for name, reason in support.missing.items():
        out.print(f"{name}: not tried: {reason}", soft_wrap=True)
    for line in support.reasons():
        out.print(line, soft_wrap=True)


def _support_table(title: str, rows: Mapping[str, Mapping[str, str]]) -> Table:
    """Collectives by dtype: yes, refused or wrong."""
    cells = []
    for collective, verdicts in rows.items():
        words = [verdicts.get(short(dtype), "") for dtype in DTYPES]
        cells.append([collective, *("yes" if word == "works" else word for word in words)])
    dtypes = [dtype_in_short(short(dtype)) for dtype in DTYPES]
    return table(texts("collective", *dtypes, whole=True), cells, title=title)


def dtype_in_short(dtype: str) -> str:
    """float32 as f32, float8_e4m3fn as f8."""
    dtype = dtype.partition("_")[0]
    letters = dtype.rstrip("0123456789")
    for name, brief in (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "i"), ("complex", "c")):
        if letters == name:
            return brief + dtype.removeprefix(name)
    return dtype


def seconds_in_words(seconds: float) -> str:
    """Seconds with three digits: 12.3 us, 4.56 ms, 7.89 s."""
    for unit, factor in (("us", 1e6), ("ms", 1e3)):
        if seconds * factor < 999.5:
            return f"{_three(seconds * factor)} {unit}"
    return f"{_three(seconds)} s"


def _three(value: float) -> str:
    """A number of at least three digits."""
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:.0f}"


def rate_in_words(rate: float | None) -> str:
    """Bytes a second as GB/s, with two digits at least."""
    if rate is None:
        return ""
    if rate >= 1e8:
        return f"{rate / 1e9:.3f}" if rate < 1e9 else f"{rate / 1e9:.2f}"
    return f"{rate / 1e9:.2g}" if rate >= 1e5 else f"{rate / 1e9:.0e}"


def _share(bus: float, limit: float) -> str:
    """Format bus bandwidth / limit in percent, with one decimal below 10 %."""
    share = bus / limit
    return f"{share:.0%}" if share >= 0.095 else f"{share:.1%}" if share >= 0.00095 else "<0.1%"


_PLOTLY_DASHES = ("solid", "dash", "dot", "dashdot")


def check_file(file: Path | None) -> None:
    """Raise UserError for a file format that can't be written."""
    if file is None:
        return
    if file.suffix not in (".svg", ".html"):
        raise UserError(f"--plot {file}: a picture is SVG or HTML; use a name that ends in .svg or .html")
    if file.suffix == ".html" and not is_installed("plotly"):
        raise UserError(
            f'--plot {file} needs plotly, which is not installed; pip install "samestep[report]", or use a name that '
            "ends in .svg"
        )


def write_plot(report: Report, file: Path) -> None:
    """Write the picture in the format that the file's name asks for, which `check_file` has checked."""
    text = _html(report) if file.suffix == ".html" else svg(report)
    file.write_text(text, encoding="utf-8")


def _panels(report: Report) -> Mapping[str, Sequence[Curve]]:
    """The curves of each panel: bus bandwidth with its limit, and the time of a call."""
    bus = _curves(report, lambda row: (row.bus_bandwidth or 0.0) / 1e9)
    limit = {row.bytes: rate / 1e9 for row in report.rows if row.bytes and (rate := report.limit(row))}
    if limit:
        bus.append(Curve(name="limit", colour=len(COLOURS) - 1, dash=2, points=sorted(limit.items())))
    return {"bus bandwidth, GB/s": bus, "time of a call, ms": _curves(report, lambda row: row.seconds_median * 1e3)}


def _curves(report: Report, of: Callable[[CollectiveTiming], float]) -> list[Curve]:
    """A curve for each collective and transport, over bytes; barriers, which send no bytes, have none."""
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
    sizes = Scale(base=2, step=2, in_words=binary_size)
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
