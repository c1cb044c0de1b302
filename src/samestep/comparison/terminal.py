"""The comparison in the terminal: a table of time, one of what it took, and why rows are empty."""

from rich.console import Console

from samestep.comparison.methods import SINGLE_CORE
from samestep.comparison.results import Comparison, ComparisonRow
from samestep.display.tables import WIDTH, Table, formatted, numbers, plain_console, table, texts


def print_comparison(found: Comparison, console: Console | None = None) -> None:
    """Print the tables, the reasons of rows without figures, and the messages that runs printed."""
    console = console or plain_console(width=WIDTH)
    console.print(_times(found))
    console.print(_costs(found))
    for row in found.rows:
        if row.reason is not None:
            console.print(f"{row.status}: {row.method.name}: {row.reason}", soft_wrap=True)
    for remark, names in found.remarks.items():
        console.print(f"{', '.join(names)}: {remark}", soft_wrap=True)
    apart = [row.method.name for row in found.rows if not row.passed]
    if apart:
        console.print(f"NOT the same step as one process: {', '.join(apart)}", soft_wrap=True)


def _times(found: Comparison) -> Table:
    repeats = "once" if found.repeats == 1 else f"medians of {found.repeats} runs"
    figures = (
        "ranks",
        "seconds",
        "min - max",
        "x single",
        "x one\ncore",
        "samples/s",
        "steps",
        "ms a step",
        "start-up,\ns",
    )
    columns = [*texts("method", least=17), *numbers(*figures, whole=True)]
    rows = [[row.method.name, *_time_cells(found, row)] for row in found.rows]
    return table(columns, rows, title=f"{found.job.name or found.job.recipe.task}: time of training, {repeats}")


def _time_cells(found: Comparison, row: ComparisonRow) -> list[str]:
    if row.status != "measured":
        return [str(row.processes), row.status]
    seconds = [run.seconds for run in row.runs]
    return [
        str(row.processes),
        formatted(row.seconds, "{:.2f}"),
        f"{min(seconds):.2f} - {max(seconds):.2f}",
        formatted(found.speed_up(row), "{:.2f}"),
        formatted(found.speed_up(row, SINGLE_CORE), "{:.2f}"),
        formatted(row.median(lambda run: run.samples_per_second), "{:,.0f}"),
        f"{row.runs[0].steps:,}",
        formatted(row.median(lambda run: run.step_seconds), "{:.1f}", 1e-3),
        formatted(row.median(lambda run: run.startup_seconds), "{:.1f}"),
    ]


def _costs(found: Comparison) -> Table:
    metric = (found.metric_name or "metric").replace("_", " ")
    columns = [
        *texts("method", "engine", "precision"),
        *numbers("MB of\na rank", "MB of\nall", "MB\nsent", metric),
        *texts("same step"),  # wrapped where the parameter that differs has a long name
    ]
    rows = [
        [
            row.method.name,
            row.method.engine,
            row.precision,
            formatted(row.largest_memory, "{:,.0f}", 1e6),
            formatted(row.all_memory, "{:,.0f}", 1e6),
            formatted(row.sent, "{:,.2f}", 1e6),
            formatted(row.metric, "{:.4f}"),
            verdict(row),
        ]
        for row in found.rows
    ]
    return table(
        columns,
        rows,
        title="what it took and what it learned; first losses versus one process in float64",
        caption="MB of memory: of the largest rank, of all; MB sent: by a rank in one step",
    )


def verdict(row: ComparisonRow) -> str:
    """Describe a row's first steps: within tolerance or not, how far apart, in which precision."""
    if not row.synchronous:
        return "asynchronous"
    if row.same_step is None:
        return ""
    held = row.same_step
    if held.parameters is not None and not held.parameters.same and held.difference < held.tolerance:
        return f"NO, {held.parameters.parameter} in {held.precision}"
    if held.norms is not None and not held.norms.same and held.difference < held.tolerance:
        return f"NO, gradient norms by {held.norms.difference:.0e} in {held.precision}"
    return f"{'yes' if held.same else 'NO'}, {held.difference:.0e} in {held.precision}"
