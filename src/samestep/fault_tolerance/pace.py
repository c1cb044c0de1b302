"""Pace: a rank's own time in each step, without waiting for other ranks.

Outside the engine's step a rank waits for no other: data, records and injected delays count in full. Inside it waits
in collectives, and a waiting thread uses no processor time; so there processor time counts. On an accelerator that is
the host's part of the step only.
"""

import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median

_LAGS = 1.5  # times the median of all ranks
_LEAST = 0.01  # seconds a step: as much as what rank 0 alone writes
_RECENT = 100  # steps


class Pace:
    """Measures each step of a rank."""

    def __init__(self) -> None:
        self._steps: list[float] = []
        self._ended: float | None = None
        self._outside = self._processor = 0.0
        self.elsewhere: Callable[[], float] = lambda: 0.0  # processor seconds of helper processes of this rank

    def begin(self) -> None:
        """Start of the engine's step."""
        self._outside = 0.0 if self._ended is None else time.perf_counter() - self._ended
        self._processor = time.thread_time() + self.elsewhere()

    def end(self) -> None:
        """End of the engine's step."""
        if self._ended is not None:  # the round's first step includes set-up
            self._steps.append(self._outside + time.thread_time() + self.elsewhere() - self._processor)
        self._ended = time.perf_counter()

    def pause(self) -> None:
        """Exclude the time since the last step, such as an evaluation's."""
        self._ended = time.perf_counter() if self._ended is not None else None

    def recent(self) -> float:
        """Return the median seconds of the last steps; may be called from another thread."""
        last = self._steps[-_RECENT:]
        return median(last) if last else 0.0

    def seconds(self) -> float:
        """Return the median seconds of a step; 0 before the second one."""
        return median(self._steps) if self._steps else 0.0


def lagging(seconds: Sequence[float]) -> list[int]:
    """Return the ranks whose own time is clearly longer than the median."""
    if len(seconds) < 2:
        return []
    # The median of two ranks is their mean, which neither exceeds by much; compare with the faster one.
    usual = min(seconds) if len(seconds) == 2 else median(seconds)
    return [rank for rank, own_seconds in enumerate(seconds) if own_seconds > max(_LAGS * usual, usual + _LEAST)]


def write(folder: Path, rank: int, seconds: float) -> None:
    """Write a rank's recent seconds a step for `read`."""
    new = folder / f"pace-{rank}.new"
    new.write_text(repr(seconds), encoding="ascii")
    new.replace(folder / f"pace-{rank}")


def read(folder: Path, ranks: Iterable[int]) -> dict[int, float]:
    """Read the recent seconds a step by rank; empty until all ranks have written theirs."""
    try:
        return {rank: float((folder / f"pace-{rank}").read_text(encoding="ascii")) for rank in ranks}
    except FileNotFoundError:
        return {}


class SlowRankReporter:
    """Prints the slow ranks on standard error whenever they change."""

    def __init__(self) -> None:
        self._printed: list[int] = []

    def look(self, seconds: Mapping[int, float]) -> None:
        """Check the ranks' own seconds a step."""
        ranks = list(seconds)
        slow = [ranks[index] for index in lagging(list(seconds.values()))]
        if slow and slow != self._printed:
            usual = min(seconds.values())
            named = ", ".join(f"rank {rank} ({seconds[rank]:.3f} s)" for rank in slow)
            print(f"samestep: slow: {named} a step by itself, the fastest {usual:.3f} s", file=sys.stderr, flush=True)
        self._printed = slow
