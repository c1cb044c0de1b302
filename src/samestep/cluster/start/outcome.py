"""Outcome: how a job ended, as seen by one host or over all of them; and the rank that failed first."""

import signal
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

_USERS_MISTAKE = 2  # what samestep's ranks end with, and those of argparse
_OURS = "samestep: "  # how the message of a samestep rank begins


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A rank that failed."""

    host: str
    rank: int
    exit_code: int  # of its process; a negative one is the signal that ended it
    reason: str  # its traceback, or the last lines that it wrote
    log: str  # the file with all of them
    at: float  # seconds since 1970
    follows: bool = False  # whether it says that it lost another rank
    hung: bool = False  # whether it was ended since it did not move on, as its reason says

    @property
    def how(self) -> str:
        """How its process ended."""
        if self.hung:
            return "it hung, and was ended"
        return f"exit code {self.exit_code}" if self.exit_code >= 0 else _signal(-self.exit_code)

    def __str__(self) -> str:
        text = f"rank {self.rank} on {self.host} failed first: {self.how}"
        if self.reason:
            text += f"\n{self.reason}"
        return f"{text}\nall that it wrote: {self.host}:{self.log}"


def _signal(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    reason = f"ended by {name}"
    return f"{reason}; the system kills so when memory runs out" if number == signal.SIGKILL else reason


def first(failures: Iterable[Failure]) -> Failure | None:
    """The root cause: the earliest, but for those whose connections broke because another rank was gone."""
    return min(failures, key=lambda failure: (failure.follows, failure.at), default=None)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a job, or one host's part of it, ended."""

    exit_code: int = 0  # as `samestep` ends: 0, 1, 2 or 128 + n
    message: str | None = None  # what there is to say
    failure: Failure | None = None  # the first of this host's ranks

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Outcome":
        failure = values["failure"]
        return cls(**{**values, "failure": Failure(**failure) if failure is not None else None})


def of_failures(failures: Iterable[Failure]) -> Outcome | None:
    """The end of a job whose ranks failed; None where none did."""
    failure = first(failures)
    if failure is None:
        return None
    if failure.exit_code != _USERS_MISTAKE:
        return Outcome(exit_code=1, message=str(failure), failure=failure)
    # A mistake in a job is the job's, not a rank's.
    message = failure.reason.removeprefix(_OURS) if failure.reason.startswith(_OURS) else str(failure)
    return Outcome(exit_code=_USERS_MISTAKE, message=message, failure=failure)
