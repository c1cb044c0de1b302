"""StepProfiler: profiles some steps of a training on one rank, and gathers the profiles of all ranks.

A rank's trace is one file for Perfetto, with the events of `torch.profiler` and of the clock.
"""

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch.profiler import profile, record_function, supported_activities

from samestep import environment
from samestep.errors import UserError
from samestep.job import Profiling
from samestep.profiling.breakdown import Profile, RankProfile, find_straggler, rank_profile
from samestep.profiling.clock import Interval, MessageWatch, StepClock, StepTimes, watched

MARK = "samestep: step "  # followed by its number: an event at the clock's start of the step

# Rows of the trace in addition to the threads.
_ROWS = {"phases": 900_000_001, "waits for messages": 900_000_002, "collectives": 900_000_003}

# PyTorch's name of a wait for a functional collective, in the waiting thread.
_WAITS = "_c10d_functional::wait_tensor"


class TraceFile:
    """The trace file of one rank. Its events are in microseconds of the profiler's clock."""

    def __init__(self, file: Path, steps: Sequence[StepTimes]) -> None:
        """Read the profiler's trace of these steps."""
        self._file = file
        self._steps = steps
        self._whole: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        self._events: list[dict[str, Any]] = self._whole["traceEvents"]
        starts = {f"{MARK}{step.step}": step.start for step in steps}
        marks = [event for event in self._events if event.get("name") in starts]
        self._thread = marks[0]["tid"] if marks else None
        # Offset from the clock's nanoseconds to the profiler's microseconds; the median, since a busy machine may
        # interrupt between the two readings.
        self._offset = median(mark["ts"] - starts[mark["name"]] / 1e3 for mark in marks) if marks else 0.0

    def on_their_way(self) -> list[Interval]:
        """Return gloo's collectives from start to completion.

        Receives are left out: one posted early transfers nothing until its sender does.
        """
        return [
            self._interval(event)
            for event in self._events
            if event.get("name", "").startswith("gloo:") and not event["name"].startswith("gloo:recv")
        ]

    def waits_in_operators(self) -> list[Interval]:
        """Waits for functional collectives in the rank's own thread."""
        return [
            self._interval(event)
            for event in self._events
            if event.get("name") == _WAITS and event.get("tid") == self._thread
        ]

    def _interval(self, event: dict[str, Any]) -> Interval:
        """An event of PyTorch's profiler, from microseconds of its clock to nanoseconds of ours."""
        start = round((event["ts"] - self._offset) * 1e3)
        return Interval(name=event["name"], start=start, end=start + round(event.get("dur", 0.0) * 1e3))

    def write(self, rank: int, ran: Sequence[Interval]) -> None:
        """Add the clock's phases and waits and the collectives `ran` of shared memory, each as a row."""
        rows = {
            "phases": [phase for step in self._steps for phase in step.phases],
            "waits for messages": [wait for step in self._steps for wait in step.waits],
            "collectives": list(ran),
        }
        for title, intervals in rows.items():
            common = {"pid": f"samestep rank {rank}", "tid": _ROWS[title]}
            self._events.append({"ph": "M", "name": "thread_name", "args": {"name": title}, **common})
            self._events += [
                {
                    "ph": "X",
                    "cat": "samestep",
                    "name": interval.name,
                    "ts": interval.start / 1e3 + self._offset,
                    "dur": (interval.end - interval.start) / 1e3,
                    **common,
                }
                for interval in intervals
            ]
        self._file.write_text(json.dumps(self._whole), encoding="utf-8")


FOLDER = "profile"  # in a run's folder
PROFILE_FILE = "profile.json"

Batch = TypeVar("Batch")


def trace_file(folder: Path, rank: int) -> Path:
    """Return the path of a rank's trace."""
    return folder / f"trace-rank{rank}.json"


class StepProfiler:
    """Profiles the requested steps, as an iterator around the training's batches."""

    def __init__(self, options: Profiling, *, first_step: int, total_steps: int, device: torch.device) -> None:
        """Raises UserError where the training is over before the first step to profile."""
        self._begin = first_step + options.warm_up
        self._stop = min(self._begin + options.steps, total_steps)
        if self._begin >= total_steps:
            raise UserError(
                f"run.profile leaves the first {options.warm_up} steps out, and the training takes "
                f"{total_steps - first_step}; use recipe.steps: {self._begin + 1} or more"
            )
        self._first_step, self._total_steps = first_step, total_steps
        self._on_accelerator = device.type != "cpu"
        self.clock = StepClock(partial(torch.accelerator.synchronize, device) if self._on_accelerator else None)
        self._watch = MessageWatch(self.clock)
        self._profiler: Any = None
        self._times: list[StepTimes] = []
        self._other_steps: list[float] = []  # seconds
        self._asked_at = 0.0
        self._over = False
        self._open = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish()

    def batches(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches; a step lasts until the next batch is requested."""
        source = iter(batches)
        step = self._first_step
        while True:
            self._between(step)
            with self.clock.of("data"):
                batch = next(source, None)
            if batch is None:
                return
            yield batch
            step += 1

    def finish(self) -> None:
        """End the last step."""
        if not self._over:
            self._between(self._total_steps)
            self._over = True

    def _between(self, step: int) -> None:
        """End the previous step, if any, and start or stop the profiler."""
        if (times := self.clock.end()) is not None:
            self._times.append(times)
        elif self._is_usual(step - 1):
            self._other_steps.append(time.perf_counter() - self._asked_at)
        if step >= self._stop:
            self._open.close()
        if step == self._begin - 1:
            self._open.enter_context(watched(self._watch))
            self._open.enter_context(environment.quiet_profiler())
            # Operators are recorded from here on, a step before the clock: the profiler's own first step is slow.
            self._profiler = self._open.enter_context(profile(activities=supported_activities()))
        if self._begin <= step < self._stop:
            with record_function(f"{MARK}{step}"):
                self.clock.begin(step)
        self._asked_at = time.perf_counter()

    def _is_usual(self, step: int) -> bool:
        """Whether an unprofiled step is typical: not the first one, nor the one whose bytes are counted."""
        return step > self._first_step and step not in (self._first_step + 2, self._begin - 1)

    def gather(self, folder: Path, *, rank: int, layout: str) -> Profile | None:
        """Write this rank's trace, and gather all ranks' profiles. Collective.

        None if the training ended before a step was profiled. Rank 0 writes the table as JSON.
        """
        self.finish()
        own = None if self._profiler is None or not self._times else self._of_rank(folder, rank)
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, own)
        ranks: list[RankProfile] = [rank for rank in of_ranks if rank is not None]
        if len(ranks) < len(of_ranks):
            return None
        profile = Profile(
            layout=layout,
            steps=tuple(step.step for step in self._times),
            ranks=tuple(ranks),
            straggler=find_straggler(ranks),
            usual_seconds=median(self._other_steps) if self._other_steps else None,
            folder=folder,
        )
        if rank == 0:
            text = json.dumps(profile.to_json(), indent=2, ensure_ascii=False)
            (folder / PROFILE_FILE).write_text(text + "\n", encoding="utf-8")
        return profile

    def _of_rank(self, folder: Path, rank: int) -> RankProfile:
        """Write this rank's trace, and compute its profile."""
        folder.mkdir(parents=True, exist_ok=True)
        file = trace_file(folder, rank)
        self._profiler.export_chrome_trace(str(file))
        trace = TraceFile(file, self._times)
        ran = self._watch.ran()
        trace.write(rank, ran)
        return rank_profile(
            rank,
            self._times,
            ran=[*ran, *trace.on_their_way()],
            unseen=trace.waits_in_operators(),
            idles=not self._on_accelerator,
        )
