"""Plans in the terminal: ranked layouts, the fewest devices, and predictions beside published steps."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from samestep.display.console import plain_console
from samestep.planning.accuracy import CrossValidation, GroupErrors
from samestep.planning.price import Price, cost_of
from samestep.planning.search import Candidate, Lever, Plan, why_slower


def print_plan(plan: Plan, price: Price | None, console: Console | None = None) -> None:
    """Print the fastest layouts, what bounds each, and why it is slower than the best."""
    console = console or plain_console()
    job, cluster = plan.job, plan.cluster
    table = Table(
        title=f"{job.model.name} on {cluster.devices} x {cluster.device.name}: {job.global_batch:,} samples of "
        f"{job.model.seq:,} tokens a step, {job.precision}"
    )
    table.add_column("layout; bound by; slower by")
    for title in ("micro", "GB", "s a step", "tokens/s", "MFU"):
        table.add_column(title, justify="right", no_wrap=True)
    for candidate in plan.candidates:
        table.add_row(*_row(candidate, plan))
    console.print(table)
    console.print(_best_in_words(plan), soft_wrap=True)
    console.print(
        f"{plan.tried:,} layouts tried, {plan.too_large:,} do not fit in {cluster.device.memory / 1e9:.0f} GB; "
        "times are predicted, see docs/planning.md for their errors",
        soft_wrap=True,
    )
    cost = cost_of(job, cluster, plan.best.time.seconds, price)
    money = f", {cost.money:.3g} {cost.currency}" if cost.money is not None else ""
    console.print(f"a million tokens: {cost.kilowatt_hours:.3g} kWh of the devices{money}", soft_wrap=True)


def _row(candidate: Candidate, plan: Plan) -> list[str]:
    """Layout and what bounds it, micro-batch, GB, seconds, tokens a second, utilisation."""
    time = candidate.time
    link = time.links.get(time.bound)
    told = [time.bound + (f" ({link})" if link else ""), why_slower(candidate, plan.best)]
    return [
        f"{candidate.layout}\n  {'; '.join(part for part in told if part)}",
        str(candidate.micro_batch),
        f"{candidate.peak_bytes / 1e9:.1f}",
        f"{time.seconds:,.0f}" if time.seconds >= 1000 else f"{time.seconds:.3g}",
        f"{plan.job.tokens / time.seconds:,.0f}",
        f"{time.utilisation(plan.cluster.device, plan.job.precision):.1%}",
    ]


def _best_in_words(plan: Plan) -> str:
    """Describe the best layout's step: the share of each part."""
    time = plan.best.time
    shares = sorted(time.parts.items(), key=lambda part: -part[1])
    told = ", ".join(
        f"{name} {seconds / time.seconds:.0%}" for name, seconds in shares if seconds > 0.005 * time.seconds
    )
    return f'"{plan.best.layout}": {told}'


def print_minimum(model: str, device: str, levers: Sequence[Lever], console: Console | None = None) -> None:
    """The fewest devices on which a model fits, with each way to save memory."""
    table = Table(title=f"{model}: fewest {device} (powers of two) that hold one sample a data rank")
    table.add_column("with", overflow="fold")
    table.add_column("devices", justify="right")
    table.add_column("layout", overflow="fold")
    table.add_column("GB", justify="right")
    table.add_column("host GB a node", justify="right")
    for lever in levers:
        if lever.devices is None:
            table.add_row(lever.name, "none", "on no number of devices", "", "")
        else:
            host = f"{lever.host_bytes / 1e9:.0f}" if lever.host_bytes else ""
            table.add_row(lever.name, f"{lever.devices:,}", str(lever.layout), f"{lever.peak_bytes / 1e9:.1f}", host)
    (console or plain_console()).print(table)


def print_errors(
    groups: Sequence[GroupErrors], validations: Sequence[CrossValidation], console: Console | None = None
) -> None:
    """Print errors against published steps, and cross-validated errors of models left out of the fit."""
    console = console or plain_console()
    table = Table(title="predicted beside published step times")
    table.add_column("rows of")
    for title in ("rows", "mean error", "bias", "largest", "tau, mean", "tau, least"):
        table.add_column(title, justify="right", no_wrap=True)
    for group in groups:
        taus = [f"{tau:.3f}" if tau is not None else "" for tau in (group.mean_tau, group.least_tau)]
        table.add_row(
            group.name,
            f"{group.rows:,}",
            f"{group.mean_error:.2%}",
            f"{group.bias:+.1%}",
            f"{group.largest_error:+.1%}",
            *taus,
        )
    console.print(table)
    if not validations:
        return
    table = Table(title="mean error with efficiencies set on half of the models")
    table.add_column("device")
    for title in ("rows", "that half", "the other half", "as shipped"):
        table.add_column(title, justify="right", no_wrap=True)
    for each in validations:
        table.add_row(
            each.kind, f"{each.rows:,}", f"{each.fitted_error:.2%}", f"{each.other_half_error:.2%}",
            f"{each.shipped_error:.2%}",
        )  # fmt: skip
    console.print(table)
