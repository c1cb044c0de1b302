"""Fault: what ended a round, what it cost, and its report: a line on standard error and one in faults.jsonl."""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from samestep.fault_tolerance.status import Progress
from samestep.run_folder import FAULTS_FILE


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A rank's failure, which ended a round. Steps are counted from 0, as in metrics.jsonl."""

    round: int  # number of the round that it ended, from 0
    rank: int  # the first one that failed
    cause: str  # in one line
    reason: str  # the whole traceback, or the signal that ended it
    step: int  # the rank's current step; -1: before its first
    at: str  # UTC, ISO 8601
    processes: int
    layout: str
    host: str | None = None  # the rank's host, in a multi-host job
    # The cost; None if the training did not go on.
    goes_on_at: int | None = None  # the first step of the next round
    steps_lost: int | None = None  # steps taken again
    seconds: float | None = None  # from the fault to the end of the next step
    next_layout: str | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        """One line: who failed when and why, where the training goes on, and what it cost in steps and seconds."""
        where = f"in step {self.step}" if self.step >= 0 else "before its first step"
        on = f" on {self.host}" if self.host is not None else ""
        line = f"rank {self.rank}{on} failed {where}: {self.cause}"
        if self.goes_on_at is None:
            return line
        lost = f"{self.steps_lost} step{'' if self.steps_lost == 1 else 's'} lost"
        other = f" with layout {self.next_layout}" if self.next_layout not in (None, self.layout) else ""
        return f"{line}; goes on at step {self.goes_on_at}{other}, {lost}, {self.seconds:.1f} s to the next step"


class PendingFault:
    """The last round's fault, held back until its cost is known."""

    def __init__(self, tell: Callable[[Fault], None]) -> None:
        self._tell = tell
        self._kept: tuple[Fault, float, int] | None = None

    def keep(self, fault: Fault, moment: float, done: int) -> None:
        """Keep a fault. `moment`: its time in seconds; `done`: steps of the training that were complete by then."""
        self._kept = fault, moment, done

    def goes_on(self, ranks: Sequence[Progress], *, offset: float = 0.0, next_layout: str | None = None) -> bool:
        """Report the kept fault with its cost, since `ranks` take steps again; return whether there was one.

        `offset`: from the clock of `ranks` to that of the fault's moment, in seconds.
        """
        if self._kept is None:
            return False
        (fault, moment, done), self._kept = self._kept, None
        first = first_step(ranks)
        fault = replace(
            fault,
            goes_on_at=first,
            steps_lost=max(0, done - first),
            seconds=offset + max(rank.first_done_at for rank in ranks) - moment,
            next_layout=next_layout or fault.next_layout,
        )
        self._tell(fault)
        return True

    def ends(self) -> None:
        """Report the kept fault without its cost: the next round has ended before its first step."""
        if self._kept is not None:
            (fault, _, _), self._kept = self._kept, None
            self._tell(fault)


def first_step(ranks: Sequence[Progress]) -> int:
    """Return the first step that was taken in this round; at least one rank must have taken one."""
    return min(rank.first_step for rank in ranks if rank.first_step >= 0)


def tell(fault: Fault, folder: Path, *, aloud: bool = True) -> None:
    """Print a fault on standard error, and append it to faults.jsonl if the run's folder exists."""
    if aloud:
        print(f"samestep: {fault}", file=sys.stderr, flush=True)
    if not folder.is_dir():
        return
    try:
        with (folder / FAULTS_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(fault.to_json(), ensure_ascii=False) + "\n")
    except OSError as error:  # a full disk, say, which must not end the training again
        print(f"samestep: {folder / FAULTS_FILE} can't be written: {error.strerror}", file=sys.stderr, flush=True)


def cause_of(reason: str) -> str:
    """Summarize a failure in one line: a traceback's exception, else the first line."""
    lines = [line.rstrip() for line in reason.strip().splitlines() if line.strip()]
    if not lines:
        return "no reason was given"
    starts = [number for number, line in enumerate(lines) if line.startswith("Traceback")]
    if not starts:
        return lines[0]
    return next((line for line in lines[starts[-1] + 1 :] if not line.startswith(" ")), lines[-1])
