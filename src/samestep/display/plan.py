"""Plans in the terminal: ranked layouts, the fewest devices, and predictions versus published steps."""

from collections.abc import Sequence
from functools import partial

from rich.console import Console

from samestep.display.columns import SharedColumn, terminal_cells, terminal_columns
from samestep.display.tables import formatted, numbers, plain_console, table, texts
from samestep.planning.accuracy import GroupErrors
from samestep.planning.price import Cost, Price, cost_of
from samestep.planning.search import ClusterPlan, LayoutCandidate, Lever, why_slower


def print_plan(plan: ClusterPlan, price: Price | None, console: Console | None = None) -> None:
    """Print the fastest layouts, what bounds each, and why it is slower than the best."""
    console = console or plain_console()
    job, cluster = plan.job, plan.cluster
    columns = layout_columns(plan, price)
    title = (
        f"{job.model.name} on {cluster.devices} x {cluster.device.name}: {job.global_batch:,} samples of "
        f"{job.model.seq:,} tokens a step, {job.precision}"
    )
    rows = [terminal_cells(columns, candidate) for candidate in plan.candidates]
    console.print(table(terminal_columns(columns), rows, title=title))
    console.print(_best_in_words(plan), soft_wrap=True)
    console.print(
        f"{plan.tried:,} layouts tried, {plan.too_large:,} do not fit in {cluster.device.memory / 1e9:.0f} GB; "
        "times are predicted, see docs/planning.md for their errors",
        soft_wrap=True,
    )
    cost = cost_of(job, cluster, plan.best.time.seconds, price)
    money = f", {cost.money:.3g} {cost.currency}" if cost.money is not None else ""
    console.print(f"a million tokens: {cost.kilowatt_hours:.3g} kWh of the devices{money}", soft_wrap=True)


def layout_columns(plan: ClusterPlan, price: Price | None) -> list[SharedColumn[LayoutCandidate]]:
    """The columns of the table of layouts, in the terminal and in the page.

    The terminal has a layout's notes below its name, in one column, and no costs: only the best layout's, in words.
    """
    job, cluster = plan.job, plan.cluster
    number = partial(SharedColumn[LayoutCandidate], whole=True)
    words = partial(SharedColumn[LayoutCandidate], words=True)

    def cost(candidate: LayoutCandidate) -> Cost:
        return cost_of(job, cluster, candidate.time.seconds, price)

    def bound(candidate: LayoutCandidate) -> str:
        link = candidate.time.links.get(candidate.time.bound)
        return candidate.time.bound + (f" ({link})" if link else "")

    def slower(candidate: LayoutCandidate) -> str:
        return why_slower(candidate, plan.best)

    def with_notes(candidate: LayoutCandidate) -> str:
        notes = (bound(candidate), slower(candidate))
        return f"{candidate.layout}\n  {'; '.join(note for note in notes if note)}"

    def utilisation(candidate: LayoutCandidate) -> str:
        return f"{candidate.time.utilisation(cluster.device, job.precision):.1%}"

    def money(candidate: LayoutCandidate) -> str:
        return formatted(cost(candidate).money, "{:.3g}")

    return [
        words("layout; bound by; slower by", None, with_notes),
        words(None, "layout 布局", lambda candidate: str(candidate.layout)),
        number("micro", "micro-batch 微批", lambda candidate: str(candidate.micro_batch)),
        number("GB", "GB", lambda candidate: f"{candidate.peak_bytes / 1e9:.1f}"),
        number("s a step", "s", lambda candidate: _seconds(candidate.time.seconds)),
        number("tokens/s", "tokens/s", lambda candidate: f"{job.tokens / candidate.time.seconds:,.0f}"),
        number("MFU", "MFU", utilisation),
        number(None, "kWh / 10⁶ tokens", lambda candidate: f"{cost(candidate).kilowatt_hours:.3g}"),
        *([number(None, f"{price.currency} / 10⁶ tokens", money)] if price else []),
        words(None, "bound by 瓶颈", bound),
        words(None, "slower by 慢在", slower),
    ]


def _seconds(seconds: float) -> str:
    return f"{seconds:,.0f}" if seconds >= 1000 else f"{seconds:.3g}"


def _best_in_words(plan: ClusterPlan) -> str:
    """Describe the best layout's step: the share of each part."""
    time = plan.best.time
    shares = sorted(time.parts.items(), key=lambda part: -part[1])
    parts = ", ".join(
        f"{name} {seconds / time.seconds:.0%}" for name, seconds in shares if seconds > 0.005 * time.seconds
    )
    return f'"{plan.best.layout}": {parts}'


def print_minimum(model: str, device: str, levers: Sequence[Lever], console: Console | None = None) -> None:
    """The fewest devices on which a model fits, with each way to save memory."""
    rows = []
    for lever in levers:
        if lever.devices is None:
            rows.append([lever.name, "none", "on no number of devices", "", ""])
        else:
            host = f"{lever.host_bytes / 1e9:.0f}" if lever.host_bytes else ""
            rows.append([lever.name, f"{lever.devices:,}", str(lever.layout), f"{lever.peak_bytes / 1e9:.1f}", host])
    columns = [*texts("with"), *numbers("devices"), *texts("layout"), *numbers("GB", "host GB a node")]
    title = f"{model}: fewest {device} (powers of two) that hold one sample a data rank"
    (console or plain_console()).print(table(columns, rows, title=title))


def print_errors(groups: Sequence[GroupErrors], console: Console | None = None) -> None:
    """Print errors against published steps."""
    console = console or plain_console()
    columns = [
        *texts("rows of"),
        *numbers("rows", "mean error", "bias", "largest", "tau, mean", "tau, least", whole=True),
    ]
    rows = [
        [
            group.name,
            f"{group.rows:,}",
            f"{group.mean_error:.2%}",
            f"{group.bias:+.1%}",
            f"{group.largest_error:+.1%}",
            *(formatted(tau, "{:.3f}") for tau in (group.mean_tau, group.least_tau)),
        ]
        for group in groups
    ]
    console.print(table(columns, rows, title="predicted versus published step times"))
