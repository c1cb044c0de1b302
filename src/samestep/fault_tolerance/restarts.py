"""Rounds: start all ranks, and start them again from the last checkpoint when one has failed."""

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import SignalException

from samestep.errors import InterruptedJobError, RankFailedError
from samestep.fault_tolerance.fault import Fault, PendingFault, cause_of, tell
from samestep.fault_tolerance.preemption import Signals
from samestep.fault_tolerance.rank import Round
from samestep.fault_tolerance.scratch import folder_in_memory, scratch
from samestep.fault_tolerance.status import Progress
from samestep.fault_tolerance.watchdog import Watchdog
from samestep.job import Job
from samestep.layout import Layout

# Starts all ranks of a round and returns what rank 0 returned. Raises RankFailedError.
Start = Callable[[Job, Layout, Round], Any]
# A job and its layout with fewer ranks; None where there is none.
Smaller = Callable[[Job, Layout], tuple[Job, Layout] | None]


def needed(job: Job, layout: Layout) -> bool:
    """Whether a training's ranks are to be processes that another one looks after."""
    return layout.size > 1 or job.run.max_restarts > 0 or bool(job.run.inject)


def again(job: Job) -> Job:
    """The same job, going on from its last checkpoint; from its first step where it saves none."""
    if job.run.checkpoint is None:
        return job
    return replace(job, run=replace(job.run, checkpoint=replace(job.run.checkpoint, resume="auto")))


def supervised(job: Job, layout: Layout, folder: Path, *, start: Start, smaller: Smaller) -> Any:
    """Train in rounds until one ends well; `folder` is the run's.

    Raises RankFailedError when restarts are used up, InterruptedJobError where a signal stopped the job.
    """
    with (
        Signals(grace_period=job.run.grace_period) if job.run.checkpoint is not None else nullcontext() as signals,
        folder_in_memory() if _copies(job) else nullcontext() as memory,
    ):
        try:
            return _Rounds(job, layout, folder, start=start, smaller=smaller, signals=signals, memory=memory).run()
        except SignalException as error:  # the second one, between two rounds
            raise InterruptedJobError(int(error.sigval)) from None


def _copies(job: Job) -> bool:
    """Whether the job asks for copies of its state in the host's memory."""
    return job.run.checkpoint is not None and job.run.checkpoint.memory is not None


class _Rounds:
    def __init__(
        self,
        job: Job,
        layout: Layout,
        folder: Path,
        *,
        start: Start,
        smaller: Smaller,
        signals: Signals | None,
        memory: Path | None,
    ) -> None:
        self._job = job
        self._layout = layout
        self._folder = folder
        self._start = start
        self._smaller = smaller
        self._signals = signals
        self._memory = memory
        self._number = 0
        self._left = job.run.max_restarts
        self._pending = PendingFault(partial(tell, folder=folder))

    def run(self) -> Any:
        while True:
            with scratch("samestep-round-") as place:
                ranks = range(self._layout.size)
                watch = Watchdog(place, ranks, limit=self._job.run.hang_limit, goes_on=self._goes_on)
                try:
                    return self._round(place, watch)
                except RankFailedError as error:
                    hang = watch.hang
                    cause = error if hang is None else RankFailedError(hang.rank, hang.reason)
                    self._begin_another(cause, watch.last)

    def _round(self, place: Path, watch: Watchdog) -> Any:
        signals = self._signals
        round_ = Round(number=self._number, folder=place, memory=self._memory)
        with watch, signals.of(place, watch) if signals is not None else nullcontext():
            return self._start(self._job, self._layout, round_)

    def _begin_another(self, error: RankFailedError, ranks: Sequence[Progress]) -> None:
        """Prepare the next round, or raise where there is to be none."""
        self._pending.ends()
        mine = next((each for each in ranks if each.rank == error.rank), None)
        fault = Fault(
            round=self._number,
            rank=error.rank,
            cause=cause_of(error.reason),
            reason=error.reason,
            step=mine.step if mine is not None else -1,
            at=datetime.now(UTC).isoformat(timespec="milliseconds"),
            processes=self._layout.size,
            layout=str(self._layout),
        )
        interrupted = self._signals.number if self._signals is not None else None
        if interrupted is not None or not self._another(at_once=not any(each.first_done_at for each in ranks)):
            # Where nothing was tried, the error that follows says it all.
            tell(fault, self._folder, aloud=self._number > 0 or interrupted is not None)
            if interrupted is not None:
                raise InterruptedJobError(interrupted) from None
            raise error from None
        fault = replace(fault, next_layout=str(self._layout))
        # When the failed rank last moved on: at most a step before the fault, and never after it.
        moment = mine.moved_at if mine is not None else time.monotonic()
        self._pending.keep(fault, moment, max((each.done for each in ranks), default=0))
        self._number += 1
        self._job = again(self._job)

    def _another(self, *, at_once: bool) -> bool:
        """Whether there is another round: with the same layout, or a smaller one where a rank is lost for good."""
        run = self._job.run
        lost = self._left == 0 or (at_once and self._number > 0)
        if run.elastic and lost and (found := self._smaller(self._job, self._layout)) is not None:
            self._job, self._layout = found
            self._left = run.max_restarts
            return True
        self._left -= 1
        return self._left >= 0

    def _goes_on(self, ranks: Sequence[Progress]) -> None:
        """The training takes steps again."""
        self._pending.goes_on(ranks)
