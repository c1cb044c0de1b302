"""What `samestep tune` found, in the terminal."""

import yaml
from rich.console import Console
from rich.table import Table

from samestep.tuning.rows import Row, Tuned

_WIDTH = 120  # characters, where the output is a file or a pipe


def print_tuned(found: Tuned, console: Console | None = None) -> None:
    """A row for each value, the gain of all that were kept, and the section to paste."""
    console = console or _console()
    repeats = len(found.at_first.repeats)
    table = Table(title=f"{found.job.run.layout}: ms of a step, medians of {repeats}, beside the best so far")
    for title in ("setting", "value"):
        table.add_column(title, no_wrap=True)
    for title in ("ms", "before", "times as fast", "noise"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("")
    for row in found.rows:
        table.add_row(row.setting, row.value, *_numbers(row), row.status)
    console.print(table)
    for row in found.rows:
        if row.reason is not None:
            console.print(f"{row.status}: {row.setting} {row.value}: {row.reason}", soft_wrap=True)
    first, last = found.at_first.seconds, found.at_last.seconds
    console.print(
        f"a step took {first * 1e3:.1f} ms, and takes {last * 1e3:.1f} ms: {first / last:.2f} times as fast"
    )
    console.print(section(found), end="")
    if found.environment:
        variables = " ".join(f"{name}={value}" for name, value in found.environment.items())
        console.print(f"start it with {variables} before the command", soft_wrap=True)


def section(found: Tuned) -> str:
    """The `run:` section that was found best, as YAML."""
    return yaml.safe_dump({"run": found.run}, sort_keys=False, allow_unicode=True)


def _numbers(row: Row) -> list[str]:
    if row.timing is None or row.before is None or row.worth is None:
        return [""] * 4
    before = f"{row.before.seconds * 1e3:.1f}"
    return [f"{row.timing.seconds * 1e3:.1f}", before, f"{row.worth:.2f}", f"{row.noise:.0%}"]


def _console() -> Console:
    """Standard output, as wide as the table where it is a file or a pipe."""
    console = Console(markup=False, emoji=False)
    return console if console.is_terminal else Console(markup=False, emoji=False, width=_WIDTH)
