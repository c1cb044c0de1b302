"""Processes of a round that are stopped (SIGSTOP, or a background process that reads the terminal), seen in /proc.

A stopped process does nothing, not even end, and tells nothing. The process that ranks are forked from is samestep's
own, and is let go on. A rank is named; the watchdog ends the round if the rank is still stopped after its limit.
"""

import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from samestep.fault_tolerance.status import Progress

_APART = 1.0  # seconds between two looks
_TOLD_AFTER = 10.0  # seconds
_LIMIT = 60.0  # seconds for ranks of other programs, which publish no limit


@dataclass(frozen=True, kw_only=True)
class StoppedRank:
    """A rank that has been stopped for too long."""

    rank: int
    reason: str


class StoppedProcesses:
    """Looks which processes of a round are stopped, and since when."""

    def __init__(self, server: Callable[[], int | None]) -> None:
        """`server` returns the id of the process that ranks are forked from."""
        self.ranks: Mapping[int, int] = {}  # the ranks' process ids
        self._server = server
        self._since: dict[int, float] = {}  # process id -> seconds at which it was first seen stopped
        self._told: set[int] = set()
        self._now = 0.0
        self._looked = -_APART

    def look(self, seconds: float, limit: float | None) -> None:
        """Look at all processes, at most once a second, and name those that are stopped for longer.

        `seconds`: of a clock that stands still while this process does. `limit`: after which a rank is taken as hung.
        """
        self._now = seconds
        if seconds - self._looked < _APART:
            return
        self._looked = seconds
        server = self._server()
        names = {pid: f"rank {rank}" for rank, pid in self.ranks.items()}
        if server is not None:
            names[server] = "the process that ranks are forked from"
        self._since = {pid: self._since.get(pid, seconds) for pid in names if is_stopped(pid)}
        self._told &= self._since.keys()
        patience = min(_TOLD_AFTER, (limit or _LIMIT) / 2)
        for pid, since in self._since.items():
            if seconds - since >= patience and pid not in self._told:
                self._told.add(pid)
                self._tell(pid, names[pid], seconds - since, ours=pid == server)

    def _tell(self, pid: int, name: str, seconds: float, *, ours: bool) -> None:
        """Name a stopped process, and let samestep's own go on."""
        text = f"{name} (process {pid}) is stopped (SIGSTOP) for {seconds:.0f} s"
        if ours:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGCONT)
            text += "; samestep has let it go on"
        else:
            text += f"; kill -CONT {pid} lets it go on"
        print(f"samestep: {text}", file=sys.stderr, flush=True)

    def any_rank(self) -> bool:
        """Whether a rank is stopped."""
        return any(pid in self._since for pid in self.ranks.values())

    def foreign(self, statuses: Sequence[Progress], limit: float | None) -> StoppedRank | None:
        """Find a rank that writes no status and has been stopped for longer than the limit."""
        with_status = {progress.rank for progress in statuses}
        for rank, pid in self.ranks.items():
            seconds = self._now - self._since.get(pid, self._now)
            if rank not in with_status and seconds > (limit or _LIMIT):
                reason = f"it hung: its process ({pid}) was stopped (SIGSTOP) for {seconds:.0f} s"
                return StoppedRank(rank=rank, reason=reason)
        return None


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped, other than by a debugger; False if unknown."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[:1] == ["T"]  # the name before it may hold anything
