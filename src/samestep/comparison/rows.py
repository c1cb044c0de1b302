"""What a comparison found: a row a method, with the figures of every repeat, and what is computed from them."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from samestep.comparison.figures import Figures
from samestep.comparison.methods import SINGLE, SINGLE_CORE, Method
from samestep.comparison.published import PUBLISHED
from samestep.comparison.same_step import TOLERANCES, SameStep
from samestep.job import Job
from samestep.jobfile import plain

Status = Literal["measured", "refused", "not installed", "failed"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """A method: measured, or the reason why not."""

    method: Method
    processes: int
    threads: int  # of each process
    precision: str
    status: Status
    reason: str | None = None  # of a method that was not measured
    output: str | None = None  # all that a failed run printed
    runs: Sequence[Figures] = ()
    synchronous: bool = True  # whether the method promises the step of one process at all
    same_step: SameStep | None = None

    @property
    def passed(self) -> bool:
        """Whether it took the same step, or never said that it would, or took none."""
        return not self.synchronous or self.same_step is None or self.same_step.same

    def median(self, figure: Callable[[Figures], float]) -> float | None:
        return statistics.median(map(figure, self.runs)) if self.runs else None

    @property
    def seconds(self) -> float | None:
        """Of training, the median of the repeats."""
        return self.median(lambda run: run.seconds)

    @property
    def largest_memory(self) -> float | None:
        return self.median(lambda run: max(run.peak_memory_bytes))

    @property
    def all_memory(self) -> float | None:
        return self.median(lambda run: sum(run.peak_memory_bytes))

    @property
    def sent(self) -> float | None:
        """Bytes that a rank sends in one step, of the rank that sends most."""
        return self.median(lambda run: max(run.sent_bytes)) if self.runs and self.runs[0].sent_bytes else None

    @property
    def metric(self) -> float | None:
        values = [run.metric for run in self.runs if run.metric is not None]
        return statistics.median(values) if values else None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Many methods on one job."""

    job: Job
    processes: int
    cores: int  # that every method has, but those that say otherwise
    repeats: int
    rows: Sequence[Row]
    machine: Mapping[str, Any]

    @property
    def passed(self) -> bool:
        """Whether every synchronous method that ran took the same step."""
        return all(row.passed for row in self.rows)

    @property
    def metric_name(self) -> str | None:
        """The task's headline metric: the first number that its metrics name."""
        return next((run.metric_name for row in self.rows for run in row.runs), None)

    @property
    def versions(self) -> dict[str, str]:
        return {name: version for row in self.rows for run in row.runs for name, version in run.versions.items()}

    def row(self, name: str) -> Row | None:
        return next((row for row in self.rows if row.method.name == name), None)

    def speed_up(self, row: Row, over: str = SINGLE) -> float | None:
        """How many times as fast as one process: on the same cores (`single`) or on one (`single-core`)."""
        base = self.row(over)
        if base is None or base.seconds is None or not row.seconds:
            return None
        return base.seconds / row.seconds

    def to_json(self) -> dict[str, Any]:
        """Everything that was found; a number that JSON doesn't have, such as a loss gone wrong, is null."""
        return _finite(self._values())

    def _values(self) -> dict[str, Any]:
        return {
            "job": plain(self.job),
            "processes": self.processes,
            "cores": self.cores,
            "repeats": self.repeats,
            "metric": self.metric_name,
            "tolerances": TOLERANCES,
            "passed": self.passed,
            "machine": dict(self.machine),
            "versions": self.versions,
            "rows": [self._row_json(row) for row in self.rows],
            "published": [{**asdict(each), "name": each.name._asdict()} for each in PUBLISHED],
        }

    def save_report(self, file: Path) -> None:
        """Write the comparison as one page of HTML, which needs no network. Raises UserError without plotly."""
        from samestep.comparison.page.page import page

        file.write_text(page(self), encoding="utf-8")

    def _row_json(self, row: Row) -> dict[str, Any]:
        method = row.method
        return {
            "method": method.name,
            "title": method.title._asdict(),
            "engine": method.engine,
            "layout": method.layout,
            "start": method.start.name,
            "processes": row.processes,
            "threads": row.threads,
            "precision": row.precision,
            "status": row.status,
            "reason": row.reason,
            "output": row.output,
            "synchronous": row.synchronous,
            "same_step": row.same_step.to_json() if row.same_step else None,
            "seconds": row.seconds,
            "speed_up_over_single": self.speed_up(row),
            "speed_up_over_single_core": self.speed_up(row, SINGLE_CORE),
            "startup_seconds": row.median(lambda run: run.startup_seconds),
            "samples_per_second": row.median(lambda run: run.samples_per_second),
            "largest_memory_bytes": row.largest_memory,
            "all_memory_bytes": row.all_memory,
            "sent_bytes": row.sent,
            "metric": row.metric,
            "repeats": [run.to_json() for run in row.runs],
        }


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
