"""Preemption: SIGTERM or Ctrl-C becomes one step after which all ranks save and stop together.

In the starting process the first signal gives the ranks notice; then they are ended.

Why not stop at once: a rank that stops alone leaves the others in a collective. So the signal is noted, and the ranks
agree on it between steps: every few steps (about four times a second, at most 64 apart) they take the maximum of
their signals' numbers, in a group of its own. All hear of it after the same step, save, and end with 128 + that.
"""

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import SignalException

from samestep.fault_tolerance.signals import ASKING, TwoSignals
from samestep.fault_tolerance.status import give_notice
from samestep.fault_tolerance.watchdog import Watchdog

_APART = 0.25  # seconds between two all-reduces
_MOST_STEPS = 64


class StopAgreement:
    """Lets the ranks agree on a stop signal by an all-reduce of two numbers, which overlaps a step.

    The all-reduce runs about every quarter of a second, as measured by the slowest rank, so that its cost is
    negligible.
    """

    def __init__(self, world_size: int, *, forwarded: bool) -> None:
        """Create the group (collective). `forwarded`: the starting process forwards signals; none ends the rank."""
        self._signals = TwoSignals(
            ASKING,
            first=self.hear,
            second=self.hear if forwarded else self._end,
            # A terminal sends it to every process; the starting process handles it.
            ignored=(signal.SIGINT,) if forwarded else (),
        )
        self.apart = _APART
        self._group: Any = dist.new_group(backend="gloo") if world_size > 1 else None
        self._asked = 0
        self._due: int | None = None
        self._work: Any = None
        self._message = torch.zeros(2, dtype=torch.int64)  # [signal, steps until the next all-reduce]
        self._last: tuple[int, float] | None = None  # step and time of the last all-reduce

    def listen(self) -> None:
        """Install the signal handlers, if this is the main thread."""
        self._signals.listen()

    def leave(self) -> None:
        """Restore the previous signal handlers."""
        self._signals.leave()

    def hear(self, number: int) -> None:
        self._asked = self._asked or number

    def _end(self, number: int) -> None:
        """End the process by a second signal's default action."""
        self.leave()
        os.kill(os.getpid(), number)

    def begin(self, step: int) -> None:
        """Before a step: start the all-reduce if it is due."""
        if self._group is None:
            return
        if self._last is not None and step <= self._last[0]:  # the training has rolled back
            self._due = self._last = None
        if self._due is not None and step < self._due:
            return
        self._message[0], self._message[1] = self._asked, self._steps_apart(step)
        self._work = dist.all_reduce(self._message, op=dist.ReduceOp.MAX, group=self._group, async_op=True)

    def end(self, step: int) -> int | None:
        """After a step: return the signal for which all ranks stop here; None to go on."""
        if self._group is None:
            return self._asked or None
        if self._work is None:
            return None
        self._work.wait()
        self._work = None
        number, apart = self._message.tolist()
        self._due = step + apart
        return number or None

    def _steps_apart(self, step: int) -> int:
        """Return the number of steps until the next all-reduce, from the duration of a step."""
        now = time.monotonic()
        last, self._last = self._last, (step, now)
        if last is None:
            return 1
        seconds = (now - last[1]) / (step - last[0])
        most = int(_MOST_STEPS * self.apart / _APART)
        return min(most, max(1, int(self.apart / max(seconds, 1e-6))))


class Signals(TwoSignals):
    """Handles signals in the starting process during a whole training, over all rounds."""

    def __init__(self, *, grace_period: float) -> None:
        """`grace_period`: seconds for the ranks to save and end."""
        super().__init__(ASKING, first=self._notify, second=self._end)
        self._grace_period = grace_period
        self._round: tuple[Path, Watchdog] | None = None

    def begin(self, folder: Path, watch: Watchdog) -> None:
        """A round has begun; its ranks write their status into `folder`."""
        self._round = folder, watch
        if self.number is not None:
            self._tell_ranks()

    def end(self) -> None:
        """The round has ended."""
        self._round = None

    def _notify(self, number: int) -> None:
        """Notify the ranks."""
        # Not print, which isn't reentrant: the signal may interrupt one.
        name = signal.Signals(number).name
        os.write(2, f"samestep: {name}: the ranks save and stop; a second one ends them at once\n".encode())
        self._tell_ranks()

    def _end(self, number: int) -> None:
        """Kill the ranks. Raises SignalException."""
        second = f"a second {signal.Signals(number).name}"
        if self._round is not None:
            self._round[1].end_now(f"samestep ended it by SIGKILL: {second} asked for it")
        raise SignalException(second, signal.Signals(number))

    def _tell_ranks(self) -> None:
        """Write the notice for the ranks, and have the watchdog end them after the grace period (seconds)."""
        if self._round is not None and self.number is not None:
            folder, watch = self._round
            try:
                give_notice(folder, self.number)
            except OSError:  # the ranks take the signal itself for a notice
                watch.send(signal.SIGTERM)
            watch.end_within(self._grace_period, signal.Signals(self.number).name)
