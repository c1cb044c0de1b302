"""The comparison in the terminal: a table of time, one of what it took, and why rows are empty."""

from rich.console import Console

from samestep.comparison.columns import cost_columns, known_columns, time_columns
from samestep.comparison.results import Comparison
from samestep.display.columns import terminal_cells, terminal_columns
from samestep.display.tables import WIDTH, Table, plain_console, table


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
    known, times = known_columns(), time_columns(found)
    rows = [
        [*terminal_cells(known, row), *(terminal_cells(times, row) if row.status == "measured" else [row.status])]
        for row in found.rows
    ]
    title = f"{found.title}: time of training, {repeats}"
    return table(terminal_columns([*known, *times]), rows, title=title)


def _costs(found: Comparison) -> Table:
    columns = cost_columns(found)
    return table(
        terminal_columns(columns),
        [terminal_cells(columns, row) for row in found.rows],
        title="what it took and what it learned; first losses versus one process in float64",
        caption="MB of memory: of the largest rank, of all; MB sent: by a rank in one step",
    )
