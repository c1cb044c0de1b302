"""A job's plan in the terminal, and what was measured beside it."""

from collections.abc import Sequence

from rich.console import Console

from samestep.display.tables import bytes_shown, numbers, plain_console, table, texts
from samestep.job_plan.measure import Measured
from samestep.job_plan.plan import JobPlan
from samestep.job_plan.predict import Prediction, slower_by


def print_job_plan(plan: JobPlan, most: int, console: Console | None = None) -> None:
    """The fastest layouts with where their step goes, and how many could not be had."""
    console = console or plain_console()
    machine = plan.machine
    sizes = len({each.micro_batch for each in plan.predictions}) > 1
    figures = [*(["micro-batch"] if sizes else []), "memory a rank", "s a step", "times the best"]
    columns = [
        *texts("layout"),
        *texts("bound by", whole=True),
        *numbers(*figures, whole=True),
        *texts("slower by"),
    ]
    best = plan.best
    rows = [
        [
            each.layout,
            each.bound if each.fits else "does not fit",
            *([str(each.micro_batch or "whole")] if sizes else []),
            bytes_shown(each.peak_bytes),
            f"{each.seconds:.3g}",
            f"{each.seconds / best.seconds:.2f}",
            _slower(each, best),
        ]
        for each in plan.predictions[:most]
    ]
    title = f"layouts on {machine.name}, {machine.devices:,} {_unit(plan)}: predicted"
    console.print(table(columns, rows, title=title))
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
    columns = [
        *texts("layout", whole=True),
        *numbers("predicted, s", "measured, s", "error", "memory predicted", "memory measured"),
    ]
    console.print(table(columns, map(_measured_cells, rows), title="predicted, and then measured"))
    for each in rows:
        if each.reason:
            console.print(f'"{each.prediction.layout}": {each.reason}', soft_wrap=True)


def _measured_cells(measured: Measured) -> list[str]:
    """Seconds and memory, predicted and measured; of a layout that failed what was predicted."""
    predicted = measured.prediction
    if measured.seconds is None or measured.error is None:
        return [predicted.layout, f"{predicted.seconds:.3g}", "failed", "", "", ""]
    return [
        predicted.layout,
        f"{predicted.seconds:.3g}",
        f"{measured.seconds:.3g}",
        f"{measured.error:+.0%}",
        bytes_shown(predicted.peak_bytes),
        bytes_shown(measured.peak_bytes),
    ]


def _unit(plan: JobPlan) -> str:
    return "devices" if plan.machine.cluster is not None else "processes"
