"""Pace: how long a rank's steps take it by itself, without the time in which it waits for others.

Outside the engine's step a rank waits for nobody: its data, its records, what slows it down on purpose. Inside, it
waits in messages, and a thread that waits uses no processor; so there the processor's time counts. On an accelerator
that is the host's part of the step alone.
"""

import time
from collections.abc import Sequence
from statistics import median

_LAGS = 1.5  # times the median of all ranks
_LEAST = 0.01  # seconds a step; what rank 0 alone writes makes that much of a difference


class Pace:
    """Notes each step of a rank."""

    def __init__(self) -> None:
        self._steps: list[float] = []
        self._ended: float | None = None
        self._outside = self._processor = 0.0

    def begin(self) -> None:
        """The engine's step begins."""
        self._outside = 0.0 if self._ended is None else time.perf_counter() - self._ended
        self._processor = time.thread_time()

    def end(self) -> None:
        """It is done."""
        if self._ended is not None:  # the round's first step prepares what later ones use
            self._steps.append(self._outside + time.thread_time() - self._processor)
        self._ended = time.perf_counter()

    def pause(self) -> None:
        """What comes before the next step does not count."""
        self._ended = time.perf_counter() if self._ended is not None else None

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
