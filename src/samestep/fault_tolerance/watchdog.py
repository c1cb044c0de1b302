"""Watchdog: a thread of the starting process that reads each rank's status, and ends a round that makes no progress.

It names the straggler: the rank that has entered fewer collectives than the others. Its clock stands still while the
process does, so that a job that was paused has not hung.

How a hang is distinguished from slow work: every 0.1 s the state of all ranks (phase, step, collectives entered, time
of the last change) is compared with the one before. Only when nothing at all has changed for the limit
(`run.hang_limit` seconds, longer for first steps, evaluations and checkpoints, and for steps that were long before)
is it a hang. The culprit is then looked for in this order: a process that is stopped (SIGSTOP), the rank that has
entered fewer collectives than the others, the one in the earliest step, the one whose stack isn't in a wait. Its
stack is asked for by a real-time signal (`stacks`) before all ranks are killed.
"""

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from samestep.fault_tolerance import pace, stacks, status
from samestep.fault_tolerance.pace import SlowRankReporter
from samestep.fault_tolerance.status import Counts, Progress, members
from samestep.fault_tolerance.stopped import StoppedProcesses


class Clock:
    """A clock that stops while the process is stopped: each interval counts at most a few times its usual length."""

    def __init__(self, apart: float) -> None:
        self._most = 5 * apart
        self._last = time.monotonic()
        self.seconds = 0.0

    def look(self) -> float:
        """Return the seconds counted so far, including the time since the last call, capped."""
        now = time.monotonic()
        self.seconds += min(now - self._last, self._most)
        self._last = now
        return self.seconds


class Handle:
    """A handle on a live process: a pidfd where available, else its id."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._descriptor: int | None = None
        self._gone = False
        if hasattr(os, "pidfd_open"):
            try:
                self._descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                self._gone = True
            except OSError:
                self._descriptor = None  # not allowed here

    def alive(self) -> bool:
        """Whether the process is alive; by the pidfd if there is one, since ids are reused."""
        if self._gone:
            return False
        if self._descriptor is not None:
            poll = select.poll()
            poll.register(self._descriptor, select.POLLIN)
            self._gone = bool(poll.poll(0))  # readable once it has ended
        else:
            try:
                os.kill(self.pid, 0)
            except ProcessLookupError:
                self._gone = True
        return not self._gone

    def processor_seconds(self) -> float:
        """Return the processor seconds used so far; 0 if unknown."""
        try:
            times = psutil.Process(self.pid).cpu_times()
        except psutil.Error:
            return 0.0
        return times.user + times.system

    def kill(self) -> None:
        """Send SIGKILL."""
        if self.alive():
            with suppress(ProcessLookupError):
                if self._descriptor is not None:
                    signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)
                else:
                    os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor, self._gone = None, True


# Modules of the innermost Python call in a rank that waits for others.
_WAITING = ("torch/distributed/", "torch/autograd/", "torch/nn/parallel/")


def stopped(pid: int) -> bool:
    """Whether a process was stopped by SIGSTOP or a debugger; False if unknown."""
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.Error:
        return False


def behind(entered: Mapping[int, Counts]) -> list[int]:
    """Return the stragglers: ranks that lack a collective that others have entered, and wait in none themselves."""
    late: set[int] = set()
    waiting: set[int] = set()
    for key in {key for of_rank in entered.values() for key in of_rank}:
        counts = {rank: entered[rank].get(key, 0) for rank in members(key) if rank in entered}
        if len(set(counts.values())) > 1:
            late |= {rank for rank, count in counts.items() if count < max(counts.values())}
            waiting |= {rank for rank, count in counts.items() if count > min(counts.values())}
    return sorted(late - waiting or late)


def earliest(ranks: Sequence[Progress]) -> list[int]:
    """Return the ranks in the earliest step; empty if all are in the same one."""
    steps = [rank.step for rank in ranks]
    return [rank.rank for rank in ranks if rank.step == min(steps) < max(steps)]


def not_waiting(stacks: Mapping[int, str]) -> list[int]:
    """Return the ranks whose innermost call doesn't wait for others; ranks without a stack are left out."""
    ranks = []
    for rank, stack in stacks.items():
        calls = [line for line in stack.splitlines() if line.strip().startswith("File ")]
        if calls and not any(part in calls[0] for part in _WAITING):
            ranks.append(rank)
    return ranks


_APART = 0.1  # seconds between reads of the ranks' status
_PACE_APART = 30.0  # seconds between checks for slow ranks
# Factor on the limit for phases that take longer than a step.
_LONGER = 10.0
_LONG = frozenset({"start", "first step", "evaluation", "checkpoint", "end"})
# Phases in which processor time counts as progress: each so many seconds of it.
_UNTOLD = frozenset({"start", "evaluation", "checkpoint", "end"})
_SOME_WORK = 1.0
# A step may take this factor times the longest step so far, whatever the limit.
_LONGER_STEP = 5.0
# Seconds for ranks to end by themselves after one has died.
_AFTER_A_DEATH = 1.0
# Seconds for a failed rank to write its traceback.
_LAST_WORDS = 3.0


@dataclass(frozen=True, kw_only=True)
class Hang:
    """The rank that the others wait for."""

    rank: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Kill:
    """Why the watchdog has killed a rank."""

    reason: str
    follows: bool  # from the end of another rank


@dataclass(frozen=True, kw_only=True)
class OtherHosts:
    """Status and entered collectives of the ranks on other hosts."""

    ranks: Sequence[Progress] = ()
    entered: Mapping[int, Counts] = field(default_factory=dict)


class Watchdog:
    """Supervises this host's ranks during one round."""

    def __init__(
        self,
        folder: Path,
        ranks: Collection[int],
        *,
        limit: float | None,
        goes_on: Callable[[Sequence[Progress]], None],
        elsewhere: Callable[[], OtherHosts] = OtherHosts,
        server: Callable[[], int | None] = lambda: None,
    ) -> None:
        """`goes_on` is called once, after all ranks' first step; `elsewhere` returns other hosts' ranks' status.

        `server` returns the id of the process that ranks are forked from, if there is one.
        """
        self._goes_on: Callable[[Sequence[Progress]], None] | None = goes_on
        self._folder = folder
        self._ranks = ranks
        self._elsewhere = elsewhere
        self.limit = limit  # seconds; may change while the ranks run
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._monitor, name="watch", daemon=True)
        self._handles: dict[int, Handle] = {}
        self._end: tuple[float, str] | None = None  # when to kill all ranks, and why
        self._stopped = StoppedProcesses(server)
        self.kills: dict[int, Kill] = {}  # of ranks that were alive
        self.hang: Hang | None = None
        self._died_at: float | None = None
        self.last: Sequence[Progress] = ()  # status of the ranks at the last read
        self.entered: Mapping[int, Counts] = {}  # collectives entered by then

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        self.read()
        self._see_the_first_step()
        for handle in self._handles.values():
            handle.close()

    def started(self, pids: Mapping[int, int]) -> None:
        """The ranks' processes have started; those of other programs write no status."""
        self._stopped.ranks = dict(pids)
        for rank, pid in pids.items():
            self._handles.setdefault(rank, Handle(pid))

    def end_within(self, seconds: float, request: str) -> None:
        """Kill the ranks after `seconds` unless they have ended; `request`: by what they were asked to end."""
        reason = (
            f"samestep ended it by SIGKILL: it had not saved and ended within {seconds:g} s of {request} "
            "(run.grace_period)"
        )
        self._end = time.monotonic() + seconds, reason

    def send(self, number: int) -> None:
        """Send a signal to all ranks that are alive."""
        for handle in list(self._handles.values()):
            if handle.alive():
                with suppress(ProcessLookupError):
                    os.kill(handle.pid, number)

    def end_now(self, reason: str, *, follows: bool = False) -> None:
        """Kill all ranks at once."""
        self.read()
        self._kill(list(self._handles), Kill(reason=reason, follows=follows))

    def _kill(self, ranks: Iterable[int], kill: Kill) -> None:
        """Kill those of some ranks that are alive, and note why."""
        for rank in ranks:
            handle = self._handles[rank]
            if handle.alive():
                self.kills.setdefault(rank, kill)
                handle.kill()

    def _work(self, ranks: Sequence[Progress]) -> list[int]:
        """Return each rank's processor time as progress, in phases that may compute for long without a message."""
        return [
            int(self._handles[rank.rank].processor_seconds() / _SOME_WORK) if rank.phase in _UNTOLD else 0
            for rank in ranks
        ]

    def _end_others(self, rank: int) -> None:
        """Kill all ranks but one."""
        self._kill([other for other in self._handles if other != rank], _after(rank))

    def read(self) -> Sequence[Progress]:
        """Read the status of the ranks that have written one."""
        self.last = status.read(self._folder, self._ranks)
        for progress in self.last:
            if progress.rank not in self._handles:
                self._handles[progress.rank] = Handle(progress.pid)
        return self.last

    def _monitor(self) -> None:
        """Thread: reads the ranks' status, detects deaths and hangs, and ends the round."""
        clock = Clock(_APART)
        slowest, looked_at = SlowRankReporter(), 0.0
        before: Any = None
        moved_at = 0.0
        while not self._over.wait(_APART):
            seconds = clock.look()
            ranks = self.read()
            if self.hang is not None:
                self._end_all(self.hang)  # includes ranks that have started since
            self._see_the_first_step()
            self._end_peers_of_dead_rank(ranks)
            if self._end is not None and time.monotonic() > self._end[0]:
                self.end_now(self._end[1])
            self._stopped.look(seconds, self.limit)
            if self.hang is None and (halted := self._stopped.foreign(ranks, self.limit)) is not None:
                self.hang = Hang(rank=halted.rank, reason=halted.reason)
                self._end_all(self.hang)
            if seconds - looked_at > _PACE_APART:
                looked_at = seconds
                slowest.look(pace.read(self._folder, self._ranks))
            self.entered = status.read_counts(self._folder, self._ranks)
            others = self._elsewhere()
            everyone, entered = [*ranks, *others.ranks], {**others.entered, **self.entered}
            state = (
                [(progress.phase, progress.step, progress.done, progress.moved_at) for progress in everyone],
                entered,
            )
            state = *state, self._work(ranks)
            if state != before:
                before, moved_at = state, seconds
            elif self.hang is None and self._too_long(everyone, still := seconds - moved_at):
                self.hang = self._find(everyone, entered, still, alone=self._too_long(everyone, still / 2))
                if self.hang is not None:
                    self._end_all(self.hang)

    def _end_all(self, hang: Hang) -> None:
        """Kill all ranks, since one has hung."""
        self.end_now(_after(hang.rank).reason, follows=True)

    def _see_the_first_step(self) -> None:
        """Call `goes_on` once every rank has taken a step in this round."""
        done = len(self.last) == len(self._ranks) and all(progress.first_done_at for progress in self.last)
        if self._goes_on is not None and done:
            goes_on, self._goes_on = self._goes_on, None
            goes_on(self.last)

    def _end_peers_of_dead_rank(self, ranks: Sequence[Progress]) -> None:
        """After a rank has died, kill the others unless their broken connections end them within the grace times."""
        if self._died_at is None:
            if any(
                rank.phase == "failed" or (not rank.over and not self._handles[rank.rank].alive()) for rank in ranks
            ):
                self._died_at = time.monotonic()
            return
        seconds = time.monotonic() - self._died_at
        kill = Kill(reason="samestep ended it, after another rank had ended", follows=True)
        if seconds > _LAST_WORDS:
            self.end_now(kill.reason, follows=True)
        elif seconds > _AFTER_A_DEATH:
            self._kill([rank.rank for rank in ranks if rank.phase != "failed"], kill)

    def _too_long(self, ranks: Sequence[Progress], seconds: float) -> bool:
        """Whether so many seconds without progress are a hang, given the ranks' phases."""
        working = [rank for rank in ranks if not rank.over]
        if self.limit is None or not working:
            return False
        # In seconds: the job's limit, or five times the longest step so far if that is more.
        limit = max(self.limit, _LONGER_STEP * max(rank.longest for rank in working))
        # A process that is stopped doesn't take long: it does nothing.
        if not self._stopped.any_rank() and (
            len(self.last) < len(self._ranks) or any(rank.phase in _LONG for rank in working)
        ):
            limit *= _LONGER
        return seconds > limit

    def _find(
        self,
        everyone: Sequence[Progress],
        entered: Mapping[int, Counts],
        seconds: float,
        *,
        alone: bool,
    ) -> Hang | None:
        """Find this host's rank that the others wait for, with its stack; None if the culprit is on another host.

        The other ranks are killed first: requesting a stopped rank's stack resumes it, and the others would train on.
        `alone`: a rank of this host must be named, whatever other hosts' ranks did.
        """
        absent = sorted(set(self._ranks) - {progress.rank for progress in self.last})
        if absent:
            return Hang(rank=absent[0], reason=f"its process has not begun after {seconds:.0f} s")
        working = {progress.rank: progress for progress in everyone if not progress.over}
        own_ranks = {rank: progress for rank, progress in working.items() if rank in self._ranks}
        halted = [rank for rank, progress in own_ranks.items() if stopped(progress.pid)]
        late = [rank for rank in behind(entered) if rank in working]
        early = earliest(list(working.values()))
        stacks_of: dict[int, str] = {}
        candidates = halted or late or early
        if not candidates:
            stacks_of = {rank: stacks.ask(self._folder, rank, progress.pid) for rank, progress in own_ranks.items()}
            candidates = not_waiting(stacks_of)
        if not candidates and len(own_ranks) == len(working):
            candidates = sorted(own_ranks)
        if alone and not own_ranks.keys() & candidates[:1]:
            candidates = sorted(own_ranks)
        if not candidates or candidates[0] not in own_ranks:
            return None
        culprit = own_ranks[candidates[0]]
        if halted:
            self._end_others(culprit.rank)
        stack = stacks_of.get(culprit.rank) or stacks.ask(self._folder, culprit.rank, culprit.pid)
        return Hang(rank=culprit.rank, reason=_sentence(culprit, seconds, stack, halted=culprit.rank in halted))


def _after(rank: int) -> Kill:
    return Kill(reason=f"samestep ended it, after rank {rank} had hung", follows=True)


def _sentence(culprit: Progress, seconds: float, stack: str, *, halted: bool) -> str:
    """Describe a hang for the user: where, for how long, and the culprit's stack."""
    where = f"in step {culprit.step}" if culprit.phase in ("step", "first step") else f"in phase {culprit.phase}"
    if culprit.step < 0:
        where = "before its first step"
    what = "it was stopped (SIGSTOP)" if halted else "it did not come to what the others wait in"
    lines = [f"it hung {where}: no rank moved on for {seconds:.0f} s, and {what}"]
    lines.append(stack or "its stack could not be had")
    return "\n".join(lines)
