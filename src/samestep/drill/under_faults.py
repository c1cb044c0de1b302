"""A job's run under many faults: which comes when is drawn beforehand, and they are committed as it goes."""

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import psutil

from samestep.drill.disturbances import KINDS, Target, Undo

_LOOKS = 0.05  # seconds between two looks at the job
_TREE = 1.0  # seconds between two looks at its processes, which take longer
# Steps that may still be recorded after a fault by ranks that it has not reached: one that was under way, the one
# after it, and the record of a step that is written a step late.
_UNDER_WAY = 3
_END_GRACE = 3.0  # seconds for all processes to end, once what looks after them has


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A fault that is to come."""

    kind: str
    wait: float  # seconds since the one before
    chance: int  # the seed of what it draws, such as a rank


def planned(kinds: Sequence[str], *, faults: int, between: float, seed: int) -> list[Planned]:
    """So many faults, `between` seconds apart on average; the same ones for the same seed."""
    draw = random.Random(seed)
    return [
        Planned(kind=draw.choice(list(kinds)), wait=draw.uniform(0.5, 1.5) * between, chance=draw.randrange(2**32))
        for _ in range(faults)
    ]


@dataclass(kw_only=True)
class UnderFaults:
    """The run under faults, as it goes; without any it is watched alone."""

    plan: Sequence[Planned]
    stuck_after: float  # seconds without a step, after which the job is given up
    rested: bool = False  # the wait for a fault begins with the job's recovery from the one before
    say: Callable[[str], None] = lambda kind: None  # of each fault that was committed
    committed: Counter[str] = field(default_factory=Counter)
    recoveries: list[float] = field(default_factory=list)  # seconds until a step that was not taken before the fault
    left_processes: int = 0
    stuck: bool = False
    _waiting: tuple[float, int] | None = None  # the first moment of what it has to recover from, the last step then
    _ends: str = ""  # the kind that has just ended the job
    _undo: list[tuple[float, Undo]] = field(default_factory=list)  # by its moment

    def disturb(self, target: Target) -> None:
        """Commit faults until the job ends, or there are enough, and look at what is left of it then."""
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
                due = self._next()  # its ranks are at work
            if not self._ends and now - looked > _TREE:
                tree, looked = target.tree(), now
            ready = not self._ends and due is not None and now >= due and bool(self._left())
            if ready and self._commit(target):
                due, first = (None, step) if self.rested else (self._next(), first)
            time.sleep(_LOOKS)
        self._ended(target, tree)

    def goes_on(self, code: int | None) -> bool:
        """Whether a run has ended as its last fault has it end, and the job is to be started again."""
        return not self.stuck and self._ends != "" and code not in (None, 0)

    def _left(self) -> Sequence[Planned]:
        return self.plan[self.committed.total() :]

    def _next(self) -> float | None:
        """When the next fault is due, on the monotonic clock (seconds); None after the last."""
        left = self._left()
        return time.monotonic() + left[0].wait if left else None

    def _commit(self, target: Target) -> bool:
        """Commit the next fault; False where there was nothing to commit it on, and it must be tried again."""
        fault, moment = self._left()[0], time.monotonic()
        undo = KINDS[fault.kind].commit(target, random.Random(fault.chance))
        if undo is None:
            return False
        step = target.last_step()  # some may have been taken while a rank was looked for
        self.committed[fault.kind] += 1
        self._undo.append((time.monotonic() + undo.after, undo))
        self._waiting = (moment, step) if self._waiting is None else (self._waiting[0], max(step, self._waiting[1]))
        if KINDS[fault.kind].ends_job:
            self._ends = fault.kind
        self.say(fault.kind)
        return True

    def _look(self, step: int) -> None:
        """Whether the job has come beyond where it was when the last fault came; one that is to end has not."""
        if self._waiting is not None and not self._ends and step > self._waiting[1] + _UNDER_WAY:
            self._recovered()

    def _recovered(self) -> None:
        """A step was taken after a fault: its recovery is over."""
        if self._waiting is not None:
            self.recoveries.append(time.monotonic() - self._waiting[0])
            self._waiting = None

    def _take_back(self, now: float) -> None:
        """Undo what is due, such as a stopped process that goes on."""
        for moment, undo in list(self._undo):
            if now >= moment:
                self._undo.remove((moment, undo))
                undo.do()

    def _ended(self, target: Target, tree: Sequence[int]) -> None:
        """The run has ended: undo everything, and count processes that it left."""
        self._take_back(float("inf"))
        if self._ends and self._waiting is not None:  # steps that it took until it had ended
            self._waiting = (self._waiting[0], max(self._waiting[1], target.last_step()))
        elif target.poll() == 0:
            self._recovered()  # from what came just before its last step
        if self._ends != "gone" and not self.stuck:
            self.left_processes += still_there(tree)


def still_there(pids: Sequence[int]) -> int:
    """How many processes are left a while after the one that looked after them; a zombie is none."""
    until = time.monotonic() + _END_GRACE
    while (left := [pid for pid in pids if _lives(pid)]) and time.monotonic() < until:
        time.sleep(0.05)
    return len(left)


def _lives(pid: int) -> bool:
    """Whether a process runs; a zombie doesn't."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    return False
