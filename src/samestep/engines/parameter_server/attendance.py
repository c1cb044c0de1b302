"""Attendance: which workers compute at present, as a server knows it, and what was missed while one was away."""

from collections.abc import Mapping, Sequence
from typing import Any


class Attendance:
    """Workers go by their number. A worker that is away is not waited for."""

    def __init__(self, workers: int) -> None:
        self._present = set(range(workers))
        self._lost: set[int] = set()
        self._left_at: dict[int, int] = {}  # worker that is away -> updates made until then
        self._deaths = self._returns = self._missed_steps = self._missed_samples = self._meanwhile = 0

    def slowest(self, clock: Sequence[int]) -> int | None:
        """The steps of the slowest worker that is present; None where none is."""
        return min((clock[worker] for worker in self._present), default=None)

    def slowest_rank(self, clock: Sequence[int]) -> int:
        """The steps that the slowest worker which isn't lost has done or left out."""
        return min(clock[worker] for worker in range(len(clock)) if worker not in self._lost)

    @property
    def lost(self) -> int:
        """Workers that don't come back."""
        return len(self._lost)

    def leaves(self, worker: int, updates: int) -> None:
        """Its process has died; `updates`: made so far, by all."""
        self._present.discard(worker)
        self._left_at[worker] = updates
        self._deaths += 1

    def misses(self, worker: int, samples: int, *, lost: bool) -> None:
        """It leaves out its samples of a step."""
        self._missed_steps += 1
        self._missed_samples += samples
        if lost:
            self._lost.add(worker)

    def returns(self, worker: int, updates: int) -> None:
        """It computes again."""
        self._present.add(worker)
        self._meanwhile += updates - self._left_at.pop(worker)
        self._returns += 1

    def measured(self) -> Mapping[str, Any]:
        """For the report."""
        return {
            "deaths": self._deaths,
            "returns": self._returns,
            "lost_workers": self.lost,
            "missed_steps": self._missed_steps,
            "missed_samples": self._missed_samples,
            "updates_until_returns": self._meanwhile,
        }
