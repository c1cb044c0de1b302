"""One drill: a run with one fault in its own folder and processes, and what it left."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from samestep import subprocess_group
from samestep.job import Job
from samestep.jobfile import to_run
from samestep.run_folder import FAULTS_FILE, METRICS_FILE, MODEL_FILE, REPORT_FILE, json_lines

Meanwhile = Callable[[subprocess.Popen[bytes], Path], None]


@dataclass(frozen=True, kw_only=True)
class FinishedRun:
    """Exit code, output and files of a finished run."""

    code: int | None  # None: it did not end within the time limit
    output: str
    folder: Path

    @property
    def report(self) -> Mapping[str, Any]:
        file = self.folder / REPORT_FILE
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}

    @property
    def losses(self) -> list[float | None]:
        """Loss of each step."""
        return [line["loss"] for line in json_lines(self.folder / METRICS_FILE).values]

    @property
    def faults(self) -> Sequence[dict[str, Any]]:
        return json_lines(self.folder / FAULTS_FILE).values

    @property
    def weights(self) -> bytes:
        file = self.folder / MODEL_FILE
        return file.read_bytes() if file.is_file() else b""

    @property
    def last_words(self) -> str:
        """Last line of its output."""
        printed = [line for line in self.output.splitlines() if line.strip()]
        return printed[-1] if printed else "it printed nothing"


@dataclass(frozen=True, kw_only=True)
class Runs:
    """The job, place and injected fault of a drill's runs."""

    job: Job
    place: Path
    time_limit: float  # seconds of one run
    step: int  # in which the fault happens
    rank: int  # the rank that commits the fault
    step_seconds: float = 0.0  # of the slowest rank in the undisturbed run

    def train(
        self, name: str, *, meanwhile: Meanwhile | None = None, resume: str = "never", **run: Any
    ) -> FinishedRun:
        """Run the job to its end in the folder `name`, with `run` overriding its `run:` section."""
        folder = self.place / name
        settings = self.job.run.checkpoint
        assert settings is not None  # drill jobs always save
        checkpoint = replace(settings, resume=resume)
        job = replace(self.job, run=replace(self.job.run, folder=folder, checkpoint=checkpoint, **run))
        file = self.place / f"{name}.yaml"
        file.write_text(to_run(job), encoding="utf-8")
        outcome = subprocess_group.run(
            [sys.executable, "-m", "samestep", "train", str(file)],
            limit=self.time_limit,
            meanwhile=None if meanwhile is None else lambda started: meanwhile(started, folder),
        )
        return FinishedRun(code=outcome.code, output=outcome.output, folder=folder)

    def wait_for_step(self, started: subprocess.Popen[bytes], folder: Path, step: int, *, since: float = 0.0) -> bool:
        """Wait until a run has recorded `step` in a file newer than `since`; False if it ended before."""
        file = folder / METRICS_FILE
        until = time.monotonic() + self.time_limit
        while time.monotonic() < until and started.poll() is None:
            if (
                file.is_file()
                and file.stat().st_mtime >= since
                and any(x["step"] >= step for x in json_lines(file).values)
            ):
                return True
            time.sleep(0.02)
        return False


@dataclass(frozen=True, kw_only=True)
class FaultOutcome:
    """The outcome of one fault."""

    survived: bool  # the fault happened, and the training finished
    happened: str  # in a few words
    left: FinishedRun  # of the last run
    seconds: float | None = None  # from the fault to the end of the next new step
    steps_lost: int | None = None  # steps taken again


@dataclass(frozen=True, kw_only=True)
class Drill:
    """A fault that a training should survive."""

    name: str
    does: str  # in a few words
    run: Callable[[Runs], FaultOutcome]
    processes: int = 1  # minimum number of ranks
    changes_result: bool = False  # surviving it changes the batches, as a rollback does


@dataclass(frozen=True, kw_only=True)
class DrillRow:
    """One fault's result, compared with the undisturbed run."""

    fault: str
    survived: bool
    happened: str
    seconds: float | None
    steps_lost: int | None
    final_loss: float | None
    difference: float | None  # |final loss - that of the undisturbed run|
    same_weights: bool  # bit for bit
    changes_result: bool

    @property
    def passed(self) -> bool:
        return self.survived and (self.changes_result or (self.difference == 0 and self.same_weights))

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "passed": self.passed}


def row_of(drill: Drill, outcome: FaultOutcome, undisturbed: FinishedRun) -> DrillRow:
    """Build a fault's row: whether the job survived, the cost, and the difference from the undisturbed run."""
    final, expected = (left.report.get("final_loss") for left in (outcome.left, undisturbed))
    return DrillRow(
        fault=drill.name,
        survived=outcome.survived,
        happened=outcome.happened,
        seconds=outcome.seconds,
        steps_lost=outcome.steps_lost,
        final_loss=final,
        difference=None if final is None or expected is None else abs(final - expected),
        same_weights=outcome.left.weights != b"" and outcome.left.weights == undisturbed.weights,
        changes_result=drill.changes_result,
    )
