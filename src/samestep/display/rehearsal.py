"""Tables of a rehearsal in the terminal: what ranks of a job of any size would hold and send."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from samestep.display.tables import bytes_shown, print_usage
from samestep.training.rehearsal import Rehearsal


def print_rehearsals(ranks: Sequence[Rehearsal], console: Console | None = None) -> None:
    """What the ranks held and sent, then the messages of the rank that sends most, by kind and axis."""
    console = console or Console(markup=False, emoji=False)
    print_usage([each.usage for each in ranks], console, numbers=[each.rank for each in ranks])
    most = max(ranks, key=lambda each: each.usage.sent_in_all)
    if not most.collectives:
        return
    table = Table(title=f"messages of rank {most.rank} in one step")
    table.add_column("collective")
    table.add_column("axis")
    for title in ("ranks", "count", "sent"):
        table.add_column(title, justify="right")
    for each in most.collectives:
        table.add_row(each.kind, each.axis, str(each.ranks), f"{each.count:,}", bytes_shown(each.sent))
    console.print(table)
