"""The doctor's findings in the terminal."""

from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from samestep.doctor.finding import Finding, Verdict

_STYLES: dict[Verdict, str] = {"ok": "green", "warning": "yellow", "problem": "bold red"}


def print_findings(findings: Sequence[Finding], title: str, console: Console | None = None) -> None:
    """A line each, the remedy below what was found; then which collectives work, and the sum."""
    console = console or Console(markup=False, emoji=False)
    table = Table(title=title)
    table.add_column("", no_wrap=True)
    table.add_column("looked at", overflow="fold")
    table.add_column("found", overflow="fold")
    for finding in findings:
        text = Text(finding.text)
        if finding.remedy is not None:
            text.append(f"\n→ {finding.remedy}", style="dim" if finding.verdict == "ok" else "")
        table.add_row(Text(finding.verdict, style=_STYLES[finding.verdict]), finding.subject, text)
    console.print(table)
    for finding in findings:
        if finding.values.get("collectives"):
            console.print(_collectives(finding))
    counts = Counter(finding.verdict for finding in findings)
    console.print(", ".join(f"{verdict}: {counts[verdict]}" for verdict in _STYLES))


def _collectives(finding: Finding) -> Table:
    rows = finding.values["collectives"]
    dtypes = list(dict.fromkeys(dtype for row in rows.values() for dtype in row))
    table = Table(title=f"{finding.subject}, tried on {finding.values['ranks']} ranks")
    table.add_column("collective")
    for dtype in dtypes:
        table.add_column(dtype)
    for name, row in rows.items():
        table.add_row(name, *(Text(_word(row.get(dtype)), style=_style(row.get(dtype))) for dtype in dtypes))
    return table


def _word(works: bool | None) -> str:
    return "" if works is None else "works" if works else "FAILS"


def _style(works: bool | None) -> str:
    return "green" if works else "bold red"
