"""Findings: what was looked at, how it is, and what would help; as a table in the terminal."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.text import Text

from samestep.display.tables import Table, plain_console, table, texts
from samestep.errors import UserError
from samestep.host_names import check_count, check_host, quoted, shown

SSH_PORT = 22

# A name or an IPv4 address, or an IPv6 address in brackets; then a port. None begins with a dash: to ssh that is an
# option, not a host.
_HOST = re.compile(r"(?:(?P<name>\w[\w.-]*)|\[(?P<address>[0-9A-Fa-f:.]+)\])(?::(?P<port>\d+))?", re.ASCII)

_FORM = "a name or an address is wanted, with a port where it is not 22: worker-1,10.0.0.7:2222,[fd00::7]"


@dataclass(frozen=True, kw_only=True)
class HostAddress:
    """A host to examine, by name or address, and the port of its SSH server."""

    name: str
    port: int = SSH_PORT

    def __str__(self) -> str:
        name = f"[{self.name}]" if ":" in self.name else self.name
        return name if self.port == SSH_PORT else f"{name}:{self.port}"


def parse_hosts(text: str) -> tuple[HostAddress, ...]:
    """Parse the hosts of `--hosts`. Raises UserError."""
    where = f"--hosts {shown(text)[1:-1]}"
    names = text.split(",")
    check_count(len(names), where)
    return tuple(_host(each.strip(), where) for each in names)


def _host(text: str, place: str) -> HostAddress:
    """Parse a host, with a port unless it is SSH's."""
    match = _HOST.fullmatch(text)
    if match is None:
        raise UserError(f"{place}: {quoted(text)} is no host; {_FORM}")
    port = int(match["port"] or SSH_PORT)
    if not 0 < port < 65536:
        raise UserError(f'{place}: "{text}": a port is a number from 1 to 65535')
    return HostAddress(name=check_host(match["name"] or match["address"], place), port=port)


Verdict = Literal["ok", "warning", "problem"]


@dataclass(frozen=True, kw_only=True)
class DoctorFinding:
    """The result of one check, a row of the report."""

    subject: str
    verdict: Verdict
    text: str
    remedy: str | None = None
    values: Mapping[str, Any] = field(default_factory=dict)  # numbers behind the text, for the JSON file

    def to_json(self) -> dict[str, Any]:
        return {
            "subject": self.subject,
            "verdict": self.verdict,
            "text": self.text,
            "remedy": self.remedy,
            "values": dict(self.values),
        }


def ok(subject: str, text: str, remedy: str | None = None, **values: Any) -> DoctorFinding:
    """Build a finding without a problem; a remedy is optional."""
    return DoctorFinding(subject=subject, verdict="ok", text=text, remedy=remedy, values=values)


def warning(subject: str, text: str, remedy: str, **values: Any) -> DoctorFinding:
    """Build a finding that may cause problems."""
    return DoctorFinding(subject=subject, verdict="warning", text=text, remedy=remedy, values=values)


def problem(subject: str, text: str, remedy: str, **values: Any) -> DoctorFinding:
    """Build a finding that makes jobs fail, or made this run fail."""
    return DoctorFinding(subject=subject, verdict="problem", text=text, remedy=remedy, values=values)


@dataclass(frozen=True, kw_only=True)
class ExaminationRequest:
    """What to examine: other hosts, a port, and the folder of runs."""

    hosts: tuple[HostAddress, ...] = ()
    port: int | None = None
    folder: Path = Path("runs")


Check = Callable[[ExaminationRequest], Iterable[DoctorFinding]]


_STYLES: dict[Verdict, str] = {"ok": "green", "warning": "yellow", "problem": "bold red"}


def print_findings(findings: Sequence[DoctorFinding], title: str, console: Console | None = None) -> None:
    """Print a row for each finding with its remedy, then the tables of collectives, then the totals."""
    console = console or plain_console()
    rows = []
    for finding in findings:
        text = Text(finding.text)
        if finding.remedy is not None:
            text.append(f"\n→ {finding.remedy}", style="dim" if finding.verdict == "ok" else "")
        rows.append([Text(finding.verdict, style=_STYLES[finding.verdict]), finding.subject, text])
    console.print(table([*texts("", whole=True), *texts("looked at", "found")], rows, title=title))
    for finding in findings:
        if finding.values.get("collectives"):
            console.print(_collectives(finding))
    counts = Counter(finding.verdict for finding in findings)
    console.print(", ".join(f"{verdict}: {counts[verdict]}" for verdict in _STYLES))


def _collectives(finding: DoctorFinding) -> Table:
    """A table of collectives by dtype."""
    rows = finding.values["collectives"]
    dtypes = list(dict.fromkeys(dtype for row in rows.values() for dtype in row))
    cells = [
        [name, *(Text(_word(row.get(dtype)), style=_style(row.get(dtype))) for dtype in dtypes)]
        for name, row in rows.items()
    ]
    title = f"{finding.subject}, tried on {finding.values['ranks']} ranks"
    return table(texts("collective", *dtypes), cells, title=title)


def _word(works: bool | None) -> str:
    return "" if works is None else "works" if works else "FAILS"


def _style(works: bool | None) -> str:
    return "green" if works else "bold red"
