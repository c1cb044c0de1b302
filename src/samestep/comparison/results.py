"""What a comparison found: a row a method, with the figures of every repeat, and what is computed from them.

A run that ended without a result says why. The machine is described in words.
"""

import json
import math
import platform
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import psutil
import torch

from samestep import processor
from samestep.comparison.methods import PUBLISHED, SINGLE, SINGLE_CORE, ComparedMethod
from samestep.comparison.same_step import TOLERANCES, SameStep
from samestep.engines import ENGINES
from samestep.engines.registry import resolve
from samestep.errors import USERS_MISTAKE
from samestep.handwritten import FAILED, REFUSED
from samestep.job import Job
from samestep.jobfile import plain
from samestep.launch.affinity import cores
from samestep.launch.device import accelerators
from samestep.run_folder import EVALUATIONS_FILE, METRICS_FILE, REPORT_FILE, json_lines
from samestep.subprocess_group import PREFIX, CommandOutcome
from samestep.variables import without_values


class Score(NamedTuple):
    """The headline metric at a moment of the training."""

    step: int
    seconds: float  # of training until then
    value: float


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Results of one training. Seconds are those of its steps, unless the name says otherwise."""

    seconds: float
    evaluation_seconds: float
    startup_seconds: float  # the rest of the wall time: start, imports, data, model, and the files at the end
    steps: int
    samples_per_second: float
    peak_memory_bytes: Sequence[int]  # of each rank
    sent_bytes: Sequence[int]  # of each rank, in one step
    metric_name: str | None  # the first number among the task's metrics
    metric: float | None
    losses: Sequence[float]  # of each step
    times: Sequence[float]  # seconds of training after each step
    scores: Sequence[Score]  # of each evaluation
    versions: Mapping[str, str]

    @property
    def step_seconds(self) -> float:
        """The median step, which a first one that compiles doesn't move."""
        return statistics.median(after - before for before, after in pairwise((0.0, *self.times)))

    def to_json(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "step_seconds": self.step_seconds,
            "scores": [score._asdict() for score in self.scores],
        }


def read(folder: Path, wall: float) -> Figures:
    """The figures of a run that took `wall` seconds in all. Raises FileNotFoundError where it left no report."""
    report = json.loads((folder / REPORT_FILE).read_text(encoding="utf-8"))
    steps = json_lines(folder / METRICS_FILE).values
    times = list(accumulate(line["step_seconds"] + line.get("data_seconds", 0.0) for line in steps))
    metrics: dict[str, Any] = report["metrics"]
    name = next((name for name, value in metrics.items() if isinstance(value, (int, float))), None)
    evaluation_seconds = report.get("evaluation_seconds", 0.0)
    return Figures(
        seconds=report["seconds"],
        evaluation_seconds=evaluation_seconds,
        startup_seconds=max(0.0, wall - report["seconds"] - evaluation_seconds),
        steps=report["steps"],
        samples_per_second=report["samples_per_second"],
        peak_memory_bytes=report["peak_memory_bytes"],
        sent_bytes=[sum(usage["sent"].values()) for usage in report.get("usage_bytes", [])],
        metric_name=name,
        metric=metrics[name] if name is not None else None,
        losses=[line["loss"] for line in steps],
        times=times,
        scores=list(_scores(folder, name, times)) if name is not None else [],
        versions=report.get("versions", {}),
    )


def _scores(folder: Path, name: str, times: Sequence[float]) -> Iterator[Score]:
    """The metric of that name at each evaluation."""
    for line in json_lines(folder / EVALUATIONS_FILE).values:
        if name in line and 0 < line["step"] <= len(times):
            yield Score(step=line["step"], seconds=times[line["step"] - 1], value=line[name])


def losses(folder: Path) -> list[float]:
    """Read the loss of every step of a run."""
    return [line["loss"] for line in json_lines(folder / METRICS_FILE).values]


def grad_norms(folder: Path) -> list[float | None]:
    """Read the gradient norm of every step of a run; None for a step without one."""
    return [line.get("grad_norm") for line in json_lines(folder / METRICS_FILE).values]


_LINES = 3


def explain(folder: Path, outcome: CommandOutcome, limit: float) -> tuple[Literal["refused", "failed"], str]:
    """Return whether the job was refused or the run failed, and the message."""
    if outcome.code is None:
        return "failed", f"it ran longer than the time limit of {limit:g} s and was stopped"
    if (folder / REFUSED).is_file():
        return "refused", without_values((folder / REFUSED).read_text(encoding="utf-8"))
    if outcome.code == USERS_MISTAKE and PREFIX in outcome.output:
        return "refused", outcome.output.rpartition(PREFIX)[2].strip()
    # Of a handwritten rank that failed; its launcher's own words stand behind it in what was printed.
    first = min(folder.glob(f"{FAILED}*"), key=lambda file: file.stat().st_mtime, default=None)
    text = without_values(first.read_text(encoding="utf-8")) if first is not None else outcome.output
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return "failed", "\n".join(lines[-_LINES:]) or f"it ended with exit code {outcome.code} and said nothing"


def _packages() -> list[str]:
    """The packages that methods are made of; TensorFlow has another distribution for CPUs."""
    of_engines = {module for name in ENGINES for module in resolve(name).abilities.packages}
    return ["torch", *sorted(of_engines), "tensorflow-cpu"]


def machine() -> dict[str, Any]:
    there = accelerators()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    name = torch.get_device_module(accelerator).get_device_name(0) if accelerator is not None else None
    return {
        "system": platform.platform(),
        "processor": processor.name(),
        "cores": cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "accelerators": f"{there} x {name}" if there else "none",
        "python": platform.python_version(),
        "packages": {package: installed for package in _packages() if (installed := _version(package))},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


Status = Literal["measured", "refused", "not installed", "failed"]


@dataclass(frozen=True, kw_only=True)
class ComparisonRow:
    """The results of one method, or the reason why it wasn't measured."""

    method: ComparedMethod
    processes: int
    threads: int  # of each process
    precision: str
    status: Status
    reason: str | None = None  # of a method that was not measured
    output: str | None = None  # whole output of a failed run
    remarks: Sequence[str] = ()  # messages that its runs printed, such as that another way to send is used
    runs: Sequence[Figures] = ()
    synchronous: bool = True  # whether the method promises to take the step of one process
    same_step: SameStep | None = None

    @property
    def passed(self) -> bool:
        """Whether the step was the same, or is not promised or not measured."""
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
        """Bytes that one rank sends in one step; of the rank that sends most."""
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
    rows: Sequence[ComparisonRow]
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

    @property
    def remarks(self) -> dict[str, list[str]]:
        """The names of the methods whose runs printed a message, by message."""
        remarks: dict[str, list[str]] = {}
        for row in self.rows:
            for remark in row.remarks:
                remarks.setdefault(remark, []).append(row.method.name)
        return remarks

    def row(self, name: str) -> ComparisonRow | None:
        return next((row for row in self.rows if row.method.name == name), None)

    def speed_up(self, row: ComparisonRow, over: str = SINGLE) -> float | None:
        """Speed-up over one process: with all cores (`single`) or with one (`single-core`)."""
        base = self.row(over)
        if base is None or base.seconds is None or not row.seconds:
            return None
        return base.seconds / row.seconds

    @property
    def title(self) -> str:
        """The job's name, or its task, as the job file has it."""
        return str(plain(self.job.name or self.job.recipe.task, written=True))

    def to_json(self) -> dict[str, Any]:
        """Return all results as JSON; NaN and infinity, as of a diverged loss, become null."""
        return _finite(self._values())

    def _values(self) -> dict[str, Any]:
        return {
            "job": plain(self.job, written=True),
            "processes": self.processes,
            "cores": self.cores,
            "repeats": self.repeats,
            "metric": self.metric_name,
            "tolerances": TOLERANCES,
            "passed": self.passed,
            "machine": dict(self.machine),
            "versions": self.versions,
            "rows": [self._row_json(row) for row in self.rows],
            "published": [{**asdict(method), "name": method.name._asdict()} for method in PUBLISHED],
        }

    def save_report(self, file: Path) -> None:
        """Write the comparison as one page of HTML, which needs no network. Raises UserError without plotly."""
        from samestep.comparison.page import page

        file.write_text(page(self), encoding="utf-8")

    def _row_json(self, row: ComparisonRow) -> dict[str, Any]:
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
            "remarks": list(row.remarks),
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
