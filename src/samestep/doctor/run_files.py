"""The files of a run, read as they are: cut lines, missing files and values that are not numbers are no surprise."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samestep.errors import UserError
from samestep.fault_tolerance.lease_file import leases_in
from samestep.input_files import parse_json
from samestep.run_folder import (
    CHECKPOINTS,
    EVALUATIONS_FILE,
    FAULTS_FILE,
    METRICS_FILE,
    PLAN_FILE,
    REPORT_FILE,
    JsonLines,
    json_lines,
)

_KNOWN = (METRICS_FILE, EVALUATIONS_FILE, FAULTS_FILE, REPORT_FILE, CHECKPOINTS)

_ALIVE = 60.0  # seconds since the last step in which a run may still be going on


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """What a run has written into its folder, as far as it can be read."""

    folder: Path
    steps: JsonLines
    evaluations: JsonLines
    faults: JsonLines
    report: Mapping[str, Any] | None  # None: missing, as in a run that has not finished
    report_error: str | None  # why it can't be read
    plan: Mapping[str, Any] | None  # of a run whose layout was found by a plan
    unfinished_checkpoints: Sequence[str]
    samples: Mapping[int, Sequence[int]]  # of steps whose values were not finite
    seconds_ago: float | None  # since the last step was written
    held: bool  # whether there is a lease, which a training holds to its end

    @property
    def finished(self) -> bool:
        return self.report is not None or self.report_error is not None

    @property
    def may_be_running(self) -> bool:
        """Whether the run may still be going on: it holds its folder, and its last line isn't too old."""
        if self.finished or self.seconds_ago is None or not self.held:
            return False
        longest = max(self.numbers("step_seconds"), default=0.0)
        return self.seconds_ago < max(_ALIVE, 3 * longest)

    def numbers(self, name: str) -> list[float]:
        """Return the finite values of a key over all steps."""
        values = [number(line.get(name)) for line in self.steps.values]
        return [value for value in values if math.isfinite(value)]


def number(value: Any) -> float:
    """Convert a value to a float; NaN if it is not a number, or none that a float holds."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.nan


def read_run(folder: Path) -> RunFiles:
    """Read a run's folder. Raises UserError where there is none."""
    if not folder.exists():
        raise UserError(f"{folder}: there is no such folder; use a run's folder, such as runs/reviews")
    if not folder.is_dir():
        raise UserError(f"{folder} is a file; use the run's folder, {folder.parent}")
    if not any((folder / name).exists() for name in _KNOWN):
        raise UserError(f"{folder} holds no run: none of {', '.join(_KNOWN)} is there")
    report, error = _report(folder / REPORT_FILE)
    metrics = folder / METRICS_FILE
    return RunFiles(
        folder=folder,
        steps=json_lines(metrics),
        evaluations=json_lines(folder / EVALUATIONS_FILE),
        faults=json_lines(folder / FAULTS_FILE),
        report=report,
        report_error=error,
        plan=_plan(folder / PLAN_FILE),
        samples=_samples(folder),
        unfinished_checkpoints=sorted(path.name for path in (folder / CHECKPOINTS).glob("step-*.saving")),
        seconds_ago=max(0.0, time.time() - metrics.stat().st_mtime) if metrics.is_file() else None,
        held=bool(leases_in(folder)),
    )


def _plan(file: Path) -> Mapping[str, Any] | None:
    """Read plan.json; None if it is missing or truncated."""
    value = _json(file.read_text(encoding="utf-8", errors="replace")) if file.is_file() else None
    return value if isinstance(value, dict) and value.keys() >= {"seconds_by_cause", "usage_bytes"} else None


def _samples(folder: Path) -> dict[int, Sequence[int]]:
    """Read the samples of steps with non-finite values, by step."""
    samples = {}
    for file in folder.glob("nonfinite-step-*.json"):
        value = _json(file.read_text(encoding="utf-8", errors="replace"))
        if isinstance(value, dict) and isinstance(value.get("step"), int) and isinstance(value.get("samples"), list):
            samples[value["step"]] = value["samples"]
    return samples


def _report(file: Path) -> tuple[Mapping[str, Any] | None, str | None]:
    """Read report.json; return its mapping and what is wrong with it."""
    if not file.is_file():
        return None, None
    value = _json(file.read_text(encoding="utf-8", errors="replace"))
    return (value, None) if isinstance(value, dict) else (None, "it is cut, or something else wrote it")


def _json(text: str) -> Any:
    try:
        return parse_json(text)
    except ValueError:
        return None
