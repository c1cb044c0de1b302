"""A rank's trace: what `torch.profiler` recorded and what the clock noted, in one file for Perfetto."""

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from samestep.profiling.clock import Interval, StepTimes

MARK = "samestep: step "  # and its number: an event at the moment in which the clock begins the step

# Rows of the trace beside the threads.
_ROWS = {"phases": 900_000_001, "waits for messages": 900_000_002, "collectives": 900_000_003}

# What PyTorch calls a wait for a functional collective, which stands in the thread that waits.
_WAITS = "_c10d_functional::wait_tensor"


class Trace:
    """The trace file of one rank. Its events are in microseconds of the profiler's clock."""

    def __init__(self, file: Path, steps: Sequence[StepTimes]) -> None:
        """Read what the profiler wrote of these steps."""
        self._file = file
        self._steps = steps
        self._whole: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        self._events: list[dict[str, Any]] = self._whole["traceEvents"]
        starts = {f"{MARK}{step.step}": step.start for step in steps}
        marks = [event for event in self._events if event.get("name") in starts]
        self._thread = marks[0]["tid"] if marks else None
        # From nanoseconds of the clock to microseconds of the profiler; a busy machine may have stood between the two
        # readings of some step.
        self._offset = median(mark["ts"] - starts[mark["name"]] / 1e3 for mark in marks) if marks else 0.0

    def on_their_way(self) -> list[Interval]:
        """Collectives of gloo, from when they begin to when they are done.

        Receives are left out: one that was asked for early carries nothing until its sender has something.
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
                    "name": each.name,
                    "ts": each.start / 1e3 + self._offset,
                    "dur": (each.end - each.start) / 1e3,
                    **common,
                }
                for each in intervals
            ]
        self._file.write_text(json.dumps(self._whole), encoding="utf-8")
