"""The console that tables are printed to."""

from rich.console import Console

WIDTH = 120  # characters that tables fit into


def plain_console(*, width: int | None = None, highlight: bool = True) -> Console:
    """Standard output, with names as they are: a class called "[red]" is not a colour.

    `width`: characters of a line where the output is a file or a pipe; None: as many as rich takes there, 80.
    """
    console = Console(markup=False, emoji=False, highlight=highlight)
    if width is None or console.is_terminal:
        return console
    return Console(markup=False, emoji=False, highlight=highlight, width=width)
