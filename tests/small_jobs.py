"""The small job that tests start in many ways: its file, what its run writes, and its losses in one process."""

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import yaml

from samestep import jobfile
from samestep.api import train_job

TESTS = Path(__file__).parent

STEPS = 6
SAMPLES = 57
BATCH = 10
RECIPE: Mapping[str, Any] = {
    "task": f"{TESTS}/small_tasks.py:Points",
    "args": {"samples": SAMPLES, "held_out": 20},
    "batch": BATCH,
    "steps": STEPS,
    "precision": "fp64",
    "clip": 0.5,
}
RUN: Mapping[str, Any] = {"device": "cpu", "threads": 1, "log": ()}

# Losses of recipes that have been trained in this process.
_ALONE: dict[str, tuple[float, ...]] = {}


def job_file(folder: Path, name: str = "job", *, run: Mapping[str, Any] | None = None, **recipe: Any) -> Path:
    """The job, with some values of the recipe and of the run changed."""
    file = folder / f"{name}.yaml"
    values = {"recipe": {**RECIPE, **recipe}, "run": {**RUN, **(run or {})}}
    file.write_text(yaml.safe_dump(values), encoding="utf-8")
    return file


def slow_job(folder: Path, *, steps: int, seconds: float, run: Mapping[str, Any] | None = None) -> Path:
    """The same job with a loss that takes its time, so that something can happen in the middle."""
    args = {**RECIPE["args"], "seconds": seconds}
    return job_file(folder, run=run, task=f"{TESTS}/small_tasks.py:Slow", args=args, steps=steps)


def losses_alone(**recipe: Any) -> tuple[float, ...]:
    """The losses of the job in one process, this one."""
    key = json.dumps(recipe, sort_keys=True)
    if key not in _ALONE:
        with TemporaryDirectory() as folder:
            file = job_file(Path(folder), **recipe)
            _ALONE[key] = train_job(jobfile.load(file, [("run.folder", f"{folder}/run", "test")]).job).losses
    return _ALONE[key]


def lines_in(file: Path) -> list[dict[str, Any]]:
    """What stands in a file of JSON lines that may be written just now; nothing where there is none."""
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def losses_in(run: Path) -> list[float]:
    """Of the steps that a run has written so far."""
    return [line["loss"] for line in lines_in(run / "metrics.jsonl")]


def steps_in(run: Path) -> int:
    """How many steps a run has written so far."""
    return len(lines_in(run / "metrics.jsonl"))


def faults_in(run: Path) -> list[dict[str, Any]]:
    return lines_in(run / "faults.jsonl")


def wait_until(what: Callable[[], Any], limit: float = 60.0, *, told: Callable[[], str] = str) -> float:
    """Seconds until something is so. Fails the test, with what `told` says, where it isn't within `limit` seconds."""
    began = time.monotonic()
    while not what():
        if time.monotonic() - began > limit:
            pytest.fail(f"not so after {limit:.0f} s\n{told()}")
        time.sleep(0.02)
    return time.monotonic() - began
