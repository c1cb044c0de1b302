"""A drill in the terminal."""

from rich.console import Console
from rich.table import Table

from samestep.drill.run import Drilled

_WIDTH = 120  # characters, where the output is no terminal


def print_drill(drilled: Drilled) -> None:
    console = Console(markup=False, emoji=False)
    if not console.is_terminal:
        console = Console(markup=False, emoji=False, width=_WIDTH)
    table = Table(title=f"{drilled.layout}, {drilled.steps} steps, a fault in step {drilled.fault_step}")
    table.add_column("fault", no_wrap=True)
    table.add_column("what happened", overflow="fold")
    for name in ("s to the next step", "steps lost", "final loss", "difference"):
        table.add_column(name, justify="right")
    table.add_column("weights")
    table.add_column("")
    table.add_row("none", "", "", "", f"{drilled.final_loss:.6f}", "", "", "")
    for row in drilled.rows:
        table.add_row(
            row.fault,
            row.happened,
            f"{row.seconds:.1f}" if row.seconds is not None else "",
            str(row.steps_lost) if row.steps_lost is not None else "",
            f"{row.final_loss:.6f}" if row.final_loss is not None else "",
            f"{row.difference:.1e}" if row.difference is not None else "",
            "the same" if row.same_weights else "other",
            "survived" if row.passed else "FAILED",
        )
    console.print(table)
    if any(row.changes_result and row.survived for row in drilled.rows):
        console.print("nan: a batch is left out, so the result differs")
