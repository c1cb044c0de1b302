"""What one run of a method left in its folder, as the figures that are compared."""

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from samestep.training.result import REPORT_FILE


class Score(NamedTuple):
    """The headline metric at a moment of the training."""

    step: int
    seconds: float  # of training until then
    value: float


@dataclass(frozen=True, kw_only=True)
class Figures:
    """One training. Seconds are those of its steps, unless their name says otherwise."""

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
    steps = list(_lines(folder / "metrics.jsonl"))
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
    for line in _lines(folder / "evaluations.jsonl"):
        if name in line and 0 < line["step"] <= len(times):
            yield Score(step=line["step"], seconds=times[line["step"] - 1], value=line[name])


def losses(folder: Path) -> list[float]:
    """The loss of every step of a run."""
    return [line["loss"] for line in _lines(folder / "metrics.jsonl")]


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    if file.is_file():
        for line in file.read_text(encoding="utf-8").splitlines():
            yield json.loads(line)
