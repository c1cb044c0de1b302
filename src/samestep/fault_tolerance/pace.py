"""Pace: how long a rank's steps take it by itself, without the time in which it waits for others.

Outside the engine's step a rank waits for no other: its data, its records, what slows it down on purpose. Inside, it
waits in messages, and a thread that waits uses no processor; so there the processor's time counts. On an accelerator
that is the host's part of the step alone.
"""

import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median

_LAGS = 1.5  # times the median of all ranks
_LEAST = 0.01  # seconds a step; what rank 0 alone writes makes that much of a difference
_RECENT = 100  # steps


class Pace:
    """Notes each step of a rank."""

    def __init__(self) -> None:
        self._steps: list[float] = []
        self._ended: float | None = None
        self._outside = self._processor = 0.0
        self.elsewhere: Callable[[], float] = lambda: 0.0  # seconds so far in which processes computed for this rank

    def begin(self) -> None:
        """The engine's step begins."""
        self._outside = 0.0 if self._ended is None else time.perf_counter() - self._ended
        self._processor = time.thread_time() + self.elsewhere()

    def end(self) -> None:
        """It is done."""
        if self._ended is not None:  # the round's first step prepares what later ones use
            self._steps.append(self._outside + time.thread_time() + self.elsewhere() - self._processor)
        self._ended = time.perf_counter()

    def pause(self) -> None:
        """What comes before the next step does not count."""
        self._ended = time.perf_counter() if self._ended is not None else None

    def recent(self) -> float:
        """Median seconds of the last steps; may be asked from another thread."""
        last = self._steps[-_RECENT:]
        return median(last) if last else 0.0

    def seconds(self) -> float:
        """Median seconds of a step; 0 before the second one."""
        return median(self._steps) if self._steps else 0.0


def lagging(seconds: Sequence[float]) -> list[int]:
    """The ranks that take clearly longer than most."""
    if len(seconds) < 2:
        return []
    # Of two ranks the median is their mean, of which neither can be far; the faster one is the measure.
    usual = min(seconds) if len(seconds) == 2 else median(seconds)
    return [rank for rank, each in enumerate(seconds) if each > max(_LAGS * usual, usual + _LEAST)]


def write(folder: Path, rank: int, seconds: float) -> None:
    """Leave a rank's recent seconds a step where `read` finds them."""
    new = folder / f"pace-{rank}.new"
    new.write_text(repr(seconds), encoding="ascii")
    new.replace(folder / f"pace-{rank}")


def read(folder: Path, ranks: Iterable[int]) -> dict[int, float]:
    """Each rank's; none before all have left theirs."""
    try:
        return {rank: float((folder / f"pace-{rank}").read_text(encoding="ascii")) for rank in ranks}
    except FileNotFoundError:
        return {}


class Slowest:
    """Tells on standard error when another rank than before lags, in a training that goes on for long."""

    def __init__(self) -> None:
        self._told: list[int] = []

    def look(self, seconds: Mapping[int, float]) -> None:
        """`seconds` by rank."""
        ranks = list(seconds)
        slow = [ranks[index] for index in lagging(list(seconds.values()))]
        if slow and slow != self._told:
            usual = min(seconds.values())
            named = ", ".join(f"rank {rank} ({seconds[rank]:.3f} s)" for rank in slow)
            print(f"samestep: slow: {named} a step by itself, the fastest {usual:.3f} s", file=sys.stderr, flush=True)
        self._told = slow
