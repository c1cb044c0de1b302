"""The verdict in the terminal."""

from rich.console import Console

from samestep.display.tables import WIDTH, formatted, numbers, plain_console, table, texts
from samestep.script_proof.compare import Verdict


def print_verdict(verdict: Verdict, console: Console | None = None) -> None:
    """Print the largest differences next to the noise, and the first difference above the noise."""
    if console is None:
        console = plain_console(width=WIDTH)
    steps = f"{verdict.steps} step{'s' if verdict.steps != 1 else ''}"
    alone = "one" if verdict.alone == 1 else str(verdict.alone)
    losses = [row.loss for row in verdict.curve if row.loss is not None]
    measured = (
        ("loss, as given to backward", losses, None),
        ("gradients", [row.gradient for row in verdict.curve], verdict.noise["gradient"]),
        ("parameters", [row.parameters for row in verdict.curve], verdict.noise["parameters"]),
    )
    rows = [[name, f"{max(values):.2e}", formatted(noise, "{:.2e}")] for name, values, noise in measured if values]
    if verdict.curve:
        columns = [*texts("largest relative difference of"), *numbers("", "noise")]
        console.print(table(columns, rows, title=f"{verdict.processes} processes versus {alone}, {steps}"))
    for note in verdict.notes:
        console.print(f"note: {note.en}", soft_wrap=True)
    if verdict.finding is None:
        console.print("the same step: what differs is as small as the noise", soft_wrap=True)
        if verdict.not_compared:
            console.print(f"not compared: {', '.join(what.en for what in verdict.not_compared)}", soft_wrap=True)
    else:
        console.print(f"NOT the same step: {verdict.finding.line}", soft_wrap=True)
