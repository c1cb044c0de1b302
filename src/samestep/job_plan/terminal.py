"""A job's plan in the terminal, and what was measured beside it."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from samestep.display.console import plain_console
from samestep.display.tables import bytes_shown
from samestep.job_plan.measure import Measured
from samestep.job_plan.plan import JobPlan
from samestep.job_plan.predict import Prediction, slower_by


def print_job_plan(plan: JobPlan, most: int, console: Console | None = None) -> None:
    """The fastest layouts with where their step goes, and how many could not be had."""
    console = console or plain_console()
    machine = plan.machine
    table = Table(title=f"layouts on {machine.name}, {machine.devices:,} {_unit(plan)}: predicted")
    table.add_column("layout", overflow="fold")
    table.add_column("bound by", no_wrap=True)
    sizes = len({each.micro_batch for each in plan.predictions}) > 1
    for title in (*(["micro-batch"] if sizes else []), "memory a rank", "s a step", "times the best"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("slower by", overflow="fold")
    best = plan.best
    for each in plan.predictions[:most]:
        table.add_row(
            each.layout,
            each.bound if each.fits else "does not fit",
            *([str(each.micro_batch or "whole")] if sizes else []),
            bytes_shown(each.peak_bytes),
            f"{each.seconds:.3g}",
            f"{each.seconds / best.seconds:.2f}",
            _slower(each, best),
        )
    console.print(table)
    shares = sorted(best.parts.items(), key=lambda part: -part[1])
    told = ", ".join(f"{cause} {seconds / best.seconds:.0%}" for cause, seconds in shares if seconds)
    console.print(f'"{best.layout}": {told}', soft_wrap=True)
    tried = len(plan.predictions) + len(plan.refused)
    console.print(
        f"{tried} layouts rehearsed, {len(plan.refused)} refused by the job or its model, {len(plan.untried)} left "
        "out for want of time; --json has the reasons",
        soft_wrap=True,
    )


def _slower(each: Prediction, best: Prediction) -> str:
    """By how many seconds a layout is slower than the best, and the cause that explains most of it."""
    cause, seconds = slower_by(each, best)
    return f"{seconds:+.2g} s {cause}" if seconds > 0 else ""


def print_measured(rows: Sequence[Measured], console: Console | None = None) -> None:
    """Predicted beside measured."""
    console = console or plain_console()
    table = Table(title="predicted, and then measured")
    table.add_column("layout", no_wrap=True)
    for title in ("predicted, s", "measured, s", "error", "memory predicted", "memory measured"):
        table.add_column(title, justify="right")
    for each in rows:
        if each.seconds is None or each.error is None:
            table.add_row(each.prediction.layout, f"{each.prediction.seconds:.3g}", "failed", "", "", "")
            continue
        table.add_row(
            each.prediction.layout,
            f"{each.prediction.seconds:.3g}",
            f"{each.seconds:.3g}",
            f"{each.error:+.0%}",
            bytes_shown(each.prediction.peak_bytes),
            bytes_shown(each.peak_bytes),
        )
    console.print(table)
    for each in rows:
        if each.reason:
            console.print(f'"{each.prediction.layout}": {each.reason}', soft_wrap=True)


def _unit(plan: JobPlan) -> str:
    return "devices" if plan.machine.cluster is not None else "processes"
