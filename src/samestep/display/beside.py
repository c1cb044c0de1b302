"""The verdict on an exported model in the terminal."""

from rich.console import Console

from samestep.convert.beside import Beside
from samestep.display.tables import plain_console


def print_beside(beside: Beside, console: Console | None = None) -> None:
    """Print whether it is the same model, or the first thing that departs."""
    console = console or plain_console()
    verdict = "the same model as" if beside.same else "NOT the same model as"
    console.print(f"{beside.exported}: {verdict} {beside.trained}", soft_wrap=True, markup=False)
    if beside.departure is not None:
        console.print(f"first difference: {beside.departure.line}", soft_wrap=True, markup=False)
    elif beside.logits is not None:
        console.print(
            f"results apart by {beside.logits:.2g}, outputs of {beside.modules} modules compared", soft_wrap=True
        )
    for note in beside.notes:
        console.print(note, soft_wrap=True, markup=False)
