"""Attendance: a server's record of which workers are present, away or lost, and of the steps that they missed."""

from collections.abc import Mapping, Sequence
from typing import Any


class Attendance:
    """Tracks workers by number. Servers don't wait for a worker that is away."""

    def __init__(self, workers: int) -> None:
        self._present = set(range(workers))
        self._lost: set[int] = set()
        self._left_at: dict[int, int] = {}  # worker that is away -> updates made before it left
        self._deaths = self._returns = self._missed_steps = self._missed_samples = self._meanwhile = 0

    def slowest(self, clock: Sequence[int]) -> int | None:
        """The step count of the slowest worker that is present; None if none is."""
        return min((clock[worker] for worker in self._present), default=None)

    def slowest_rank(self, clock: Sequence[int]) -> int:
        """The count of done and skipped steps of the slowest worker that isn't lost."""
        return min(clock[worker] for worker in range(len(clock)) if worker not in self._lost)

    @property
    def lost(self) -> int:
        """The number of lost workers, which won't return."""
        return len(self._lost)

    def leaves(self, worker: int, updates: int) -> None:
        """Mark a worker as away, as its process has died; `updates`: made so far by all workers."""
        self._present.discard(worker)
        self._left_at[worker] = updates
        self._deaths += 1

    def misses(self, worker: int, samples: int, *, lost: bool) -> None:
        """Record that a worker skipped its samples of a step."""
        self._missed_steps += 1
        self._missed_samples += samples
        if lost:
            self._lost.add(worker)

    def returns(self, worker: int, updates: int) -> None:
        """Mark a worker as present again."""
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
