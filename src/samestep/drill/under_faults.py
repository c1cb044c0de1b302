"""The part of a soak that commits faults: a random plan drawn beforehand, carried out while the job runs."""

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import psutil

from samestep.drill.disturbances import KINDS, Target, Undo

_LOOKS = 0.05  # seconds between checks of the job
_TREE = 1.0  # seconds between listings of its processes, which are slower
# Steps that ranks may still record after a fault without having recovered: the current one, the next one, and one
# whose record is written a step late.
_UNDER_WAY = 3
_END_GRACE = 3.0  # seconds for all processes to end after the job's first process has


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A planned fault."""

    kind: str
    wait: float  # seconds since the previous one
    chance: int  # seed of its random choices, such as the rank


def planned(kinds: Sequence[str], *, faults: int, between: float, seed: int) -> list[Planned]:
    """Plan faults that are `between` seconds apart on average; reproducible from the seed."""
    draw = random.Random(seed)
    return [
        Planned(kind=draw.choice(list(kinds)), wait=draw.uniform(0.5, 1.5) * between, chance=draw.randrange(2**32))
        for _ in range(faults)
    ]


@dataclass(kw_only=True)
class UnderFaults:
    """Watches a run, and commits the planned faults; an empty plan only watches."""

    plan: Sequence[Planned]
    stuck_after: float  # seconds without a step after which the job is killed
    rested: bool = False  # the wait for a fault starts at the recovery from the previous one
    say: Callable[[str], None] = lambda kind: None  # called with the kind of each committed fault
    committed: Counter[str] = field(default_factory=Counter)
    recoveries: list[float] = field(default_factory=list)  # seconds from a fault to the first new step
    left_processes: int = 0
    stuck: bool = False
    _waiting: tuple[float, int] | None = None  # time of the first fault that is not recovered from, last step by then
    _ends: str = ""  # kind of the fault that ends the job
    _undo: list[tuple[float, Undo]] = field(default_factory=list)  # by time

    def disturb(self, target: Target) -> None:
        """Commit faults until the job ends or the plan does; then count the processes left over."""
        self._ends, tree, looked = "", target.tree(), time.monotonic()
        first, moved = target.last_step(), time.monotonic()
        due, seen = None, first
        while target.poll() is None:
            now, step = time.monotonic(), target.last_step()
            if step != seen:
                seen, moved = step, now
            if now - moved > self.stuck_after:
                self.stuck = True
                target.kill()
                break
            self._look(step)
            self._take_back(now)
            if due is None and step != first and not (self.rested and self._waiting is not None):
                due = self._next()  # its ranks are training
            if not self._ends and now - looked > _TREE:
                tree, looked = target.tree(), now
            ready = not self._ends and due is not None and now >= due and bool(self._left())
            if ready and self._commit(target):
                due, first = (None, step) if self.rested else (self._next(), first)
            time.sleep(_LOOKS)
        self._ended(target, tree)

    def goes_on(self, code: int | None) -> bool:
        """Whether the run ended because of its last fault, so that the job must be started again."""
        return not self.stuck and self._ends != "" and code not in (None, 0)

    def _left(self) -> Sequence[Planned]:
        return self.plan[self.committed.total() :]

    def _next(self) -> float | None:
        """Return when the next fault is due, on the monotonic clock (seconds); None after the last."""
        left = self._left()
        return time.monotonic() + left[0].wait if left else None

    def _commit(self, target: Target) -> bool:
        """Commit the next fault; False if it has no target now and must be retried."""
        fault, moment = self._left()[0], time.monotonic()
        undo = KINDS[fault.kind].commit(target, random.Random(fault.chance))
        if undo is None:
            return False
        step = target.last_step()  # the step after choosing a target, which may take several steps
        self.committed[fault.kind] += 1
        self._undo.append((time.monotonic() + undo.after, undo))
        self._waiting = (moment, step) if self._waiting is None else (self._waiting[0], max(step, self._waiting[1]))
        if KINDS[fault.kind].ends_job:
            self._ends = fault.kind
        self.say(fault.kind)
        return True

    def _look(self, step: int) -> None:
        """Record a recovery once the job has passed the step of its last fault, unless that fault ends the job."""
        if self._waiting is not None and not self._ends and step > self._waiting[1] + _UNDER_WAY:
            self._recovered()

    def _recovered(self) -> None:
        """Record the recovery time: a new step was taken."""
        if self._waiting is not None:
            self.recoveries.append(time.monotonic() - self._waiting[0])
            self._waiting = None

    def _take_back(self, now: float) -> None:
        """Revert faults that are due, such as by SIGCONT to a stopped process."""
        for moment, undo in list(self._undo):
            if now >= moment:
                self._undo.remove((moment, undo))
                undo.do()

    def _ended(self, target: Target, tree: Sequence[int]) -> None:
        """Revert all faults, and count leftover processes, after the run has ended."""
        self._take_back(float("inf"))
        if self._ends and self._waiting is not None:  # include steps taken until the job ended
            self._waiting = (self._waiting[0], max(self._waiting[1], target.last_step()))
        elif target.poll() == 0:
            self._recovered()  # from a fault just before the last step
        if self._ends != "gone" and not self.stuck:
            self.left_processes += still_there(tree)


def still_there(pids: Sequence[int], within: float = _END_GRACE) -> int:
    """Count the processes that are still alive after some seconds; zombies don't count."""
    until = time.monotonic() + within
    while (left := [pid for pid in pids if _lives(pid)]) and time.monotonic() < until:
        time.sleep(0.05)
    return len(left)


def _lives(pid: int) -> bool:
    """Whether a process is running, and not a zombie."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    return False
