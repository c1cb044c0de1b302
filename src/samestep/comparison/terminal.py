"""The comparison in the terminal: a table of time, one of what it took, and why rows are empty."""

from rich.console import Console

from samestep.comparison.columns import cost_columns, known_columns, time_columns
from samestep.comparison.results import Comparison
from samestep.display.columns import terminal_cells, terminal_columns
from samestep.display.tables import WIDTH, Table, plain_console, table


def print_comparison(comparison: Comparison, console: Console | None = None) -> None:
    """Print the tables, the reasons of rows without figures, and the messages that runs printed."""
    console = console or plain_console(width=WIDTH)
    console.print(_times(comparison))
    console.print(_costs(comparison))
    for row in comparison.rows:
        if row.reason is not None:
            console.print(f"{row.status}: {row.method.name}: {row.reason}", soft_wrap=True)
    for remark, names in comparison.remarks.items():
        console.print(f"{', '.join(names)}: {remark}", soft_wrap=True)
    apart = [row.method.name for row in comparison.rows if not row.passed]
    if apart:
        console.print(f"NOT the same step as one process: {', '.join(apart)}", soft_wrap=True)


def _times(comparison: Comparison) -> Table:
    repeats = "once" if comparison.repeats == 1 else f"medians of {comparison.repeats} runs"
    facts, times = known_columns(), time_columns(comparison)
    rows = [
        [*terminal_cells(facts, row), *(terminal_cells(times, row) if row.status == "measured" else [row.status])]
        for row in comparison.rows
    ]
    title = f"{comparison.title}: time of training, {repeats}"
    return table(terminal_columns([*facts, *times]), rows, title=title)


def _costs(comparison: Comparison) -> Table:
    columns = cost_columns(comparison)
    return table(
        terminal_columns(columns),
        [terminal_cells(columns, row) for row in comparison.rows],
        title="what it took and what it learned; first losses versus one process in float64",
        caption="MB of memory: of the largest rank, of all; MB sent: by a rank in one step",
    )
