"""Finding: what was looked at, how it is, and what would help."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from samestep.doctor.host_list import Host

Verdict = Literal["ok", "warning", "problem"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of what the doctor found."""

    subject: str
    verdict: Verdict
    text: str
    remedy: str | None = None
    values: Mapping[str, Any] = field(default_factory=dict)  # the figures behind the text, for a file

    def to_json(self) -> dict[str, Any]:
        return {
            "subject": self.subject,
            "verdict": self.verdict,
            "text": self.text,
            "remedy": self.remedy,
            "values": dict(self.values),
        }


def ok(subject: str, text: str, remedy: str | None = None, **values: Any) -> Finding:
    """All is well; a remedy is for those who want more."""
    return Finding(subject=subject, verdict="ok", text=text, remedy=remedy, values=values)


def warning(subject: str, text: str, remedy: str, **values: Any) -> Finding:
    """It may do harm."""
    return Finding(subject=subject, verdict="warning", text=text, remedy=remedy, values=values)


def problem(subject: str, text: str, remedy: str, **values: Any) -> Finding:
    """Some jobs can't work so, or this run did not."""
    return Finding(subject=subject, verdict="problem", text=text, remedy=remedy, values=values)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a check of the machine should look at."""

    hosts: tuple[Host, ...] = ()
    port: int | None = None
    folder: Path = Path("runs")


Check = Callable[[Asked], Iterable[Finding]]


def in_gib(count: float) -> str:
    return f"{count / 2**30:,.1f} GiB" if count >= 2**30 else f"{count / 2**20:,.0f} MiB"
