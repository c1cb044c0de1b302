"""A soak: one long job with ordered sums under many faults at random moments, compared with an undisturbed run of it.

The faults come from outside, as they do: signals to a rank, to the process that looks after the ranks, or to all; a
file that has a rank raise; hosts that go away, where who starts the job has several.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Protocol

from samestep import door, environment, subprocess_group
from samestep.drill.disturbances import INJECTED, Processes, Target, fault_file, kinds_of
from samestep.drill.drill import FinishedRun, Runs
from samestep.drill.under_faults import UnderFaults, planned
from samestep.durations import check_seconds
from samestep.errors import UserError
from samestep.fault_tolerance.scratch import left_in
from samestep.job import Checkpointing, Inject, Job
from samestep.limits import MOST_REPEATS, MOST_SEED, check_whole
from samestep.plausibility import shortened
from samestep.progress import phases
from samestep.progress.bars import Bar
from samestep.run_folder import METRICS_FILE, json_lines

_CALIBRATION = 40  # steps from which the step time is measured
_MARGIN = 1.5  # factor on the number of steps: on a shared machine steps may get faster later
_FEWEST_STEPS = 8
_HANG_LIMIT = 10.0  # seconds; the job's own limit may be minutes, too long for many hangs


@dataclass(frozen=True, kw_only=True)
class SoakSettings:
    """Settings of a soak."""

    faults: int
    kinds: Sequence[str]
    seed: int = 0
    between: float = 15.0  # seconds, on average
    steps: int | None = None  # None: as many as the faults need
    time_limit: float = 600  # seconds without a step after which a run is aborted
    rested: bool = False  # the wait for a fault starts at the recovery from the previous one

    def __post_init__(self) -> None:
        check_whole("--soak", self.faults, most=MOST_REPEATS)
        check_whole("--seed", self.seed, least=0, most=MOST_SEED)
        check_seconds(between=self.between, time_limit=self.time_limit)
        if self.steps is not None:
            check_whole("--steps", self.steps, least=_FEWEST_STEPS)


class SoakRunner(Protocol):
    """Where and how a soak's runs are started."""

    def train(self, name: str, job: Job, watch: Callable[[Target], None]) -> FinishedRun:
        """Start the job in the folder `name`, call `watch` until it has ended, and return its results."""
        ...

    def folder(self, name: str) -> Path:
        """The folder of the run of this name."""
        ...

    def left_files(self) -> set[Path]:
        """List samestep's scratch folders, in memory and on disk, whose process has ended."""
        ...


@dataclass(frozen=True, kw_only=True)
class OneHost:
    """Runs jobs on this host."""

    place: Path
    processes: int

    def train(self, name: str, job: Job, watch: Callable[[Target], None]) -> FinishedRun:
        runs = Runs(job=job, place=self.place, time_limit=math.inf, step=0, rank=0)
        checkpoint = job.run.checkpoint
        assert checkpoint is not None  # soak jobs always save
        return runs.train(
            name,
            meanwhile=lambda started, folder: watch(Processes(started, folder, self.processes)),
            resume=checkpoint.resume,
        )

    def folder(self, name: str) -> Path:
        return self.place / name

    def left_files(self) -> set[Path]:
        return set(left_in())


@dataclass(frozen=True, kw_only=True)
class SoakReport:
    """The results of a soak."""

    layout: str
    steps: int
    seed: int
    between: float  # seconds
    wanted: int
    faults: Mapping[str, int]  # committed, by kind
    ended: bool  # the run under faults reached its last step
    same_weights: bool  # bit for bit those of the undisturbed run
    same_losses: bool
    samples_lost: int
    samples_repeated: int
    goodput: float  # seconds of the undisturbed run / seconds of this one, with all starts
    slowest_recovery: float | None  # recovery times: seconds from a fault to the first new step
    median_recovery: float | None
    left_processes: int
    left_files: int
    last_words: str
    seconds: float = 0.0  # of the run under faults
    step_seconds: float = 0.0  # of the undisturbed one
    recoveries: Sequence[float] = field(default_factory=list)  # seconds, in the order of the faults

    @property
    def passed(self) -> bool:
        """Whether weights and losses match, no sample was lost or repeated, nothing was left, and all faults came."""
        lost = self.samples_lost or self.samples_repeated or self.left_processes or self.left_files
        enough = sum(self.faults.values()) >= self.wanted
        return self.ended and enough and self.same_weights and self.same_losses and not lost

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "passed": self.passed}


@phases.command("drill")
def soak_job(
    job: Job,
    *,
    faults: int,
    seed: int = 0,
    between: float = 15.0,
    kinds: Sequence[str] | None = None,
    steps: int | None = None,
    time_limit: float = 600,
) -> SoakReport:
    """Train a job undisturbed, and once more under so many faults, `between` seconds apart on average.

    `steps`: None for as many as the faults take. `time_limit`: seconds without a step, after which a run is given up.
    Raises UserError for what is wrong with the job, also where the undisturbed run fails.
    """
    if environment.ranks() is not None:
        raise UserError("drill starts its own processes; start it without a launcher")
    settings = SoakSettings(
        faults=faults,
        seed=seed,
        between=between,
        kinds=kinds_of(kinds, ranks=door.layout_of(job).size),
        steps=steps,
        time_limit=time_limit,
    )
    job = soaked_job(job, faults)
    layout = door.check(job).layout
    with TemporaryDirectory(prefix="samestep-drill-") as folder, subprocess_group.signals_raise():
        return soak(OneHost(place=Path(folder), processes=layout.size), job, settings)


def soak(place: SoakRunner, job: Job, settings: SoakSettings) -> SoakReport:
    """Soak a job of `soaked_job` that was checked. Raises UserError where the undisturbed run fails."""
    layout = door.layout_of(job)
    with Bar("soak", settings.faults) as bar:
        bar.say("a few steps, for their time")
        step_seconds = _step_seconds(_undisturbed(place, "calibration", _with_steps(job, _CALIBRATION, 10), settings))
        total = settings.steps or max(
            _CALIBRATION, math.ceil(_MARGIN * settings.faults * settings.between / step_seconds)
        )
        job = _with_steps(job, total, max(1, round(1 / step_seconds)))
        bar.say(f"undisturbed, {total:,} steps")
        began = time.monotonic()
        undisturbed = _undisturbed(place, "undisturbed", job, settings)
        quiet_seconds = time.monotonic() - began
        bar.say("under faults")
        under = UnderFaults(
            plan=planned(settings.kinds, faults=settings.faults, between=settings.between, seed=settings.seed),
            stuck_after=settings.time_limit,
            rested=settings.rested,
            say=bar.advance,
        )
        files_before, began = place.left_files(), time.monotonic()
        left = place.train("soak", _for_faults(job, place.folder("soak"), layout.size), under.disturb)
        while under.goes_on(left.code):
            resumed = _for_faults(job, place.folder("soak"), layout.size, resume="auto")
            left = place.train("soak", resumed, under.disturb)
        seconds = time.monotonic() - began
        lost, repeated = _samples(undisturbed, left)
        return SoakReport(
            layout=str(layout),
            steps=total,
            seed=settings.seed,
            between=settings.between,
            wanted=settings.faults,
            faults=dict(sorted(under.committed.items())),
            ended=left.code == 0,
            same_weights=left.weights != b"" and left.weights == undisturbed.weights,
            same_losses=left.losses == undisturbed.losses,
            samples_lost=lost,
            samples_repeated=repeated,
            goodput=quiet_seconds / seconds,
            slowest_recovery=max(under.recoveries, default=None),
            median_recovery=median(under.recoveries) if under.recoveries else None,
            left_processes=under.left_processes,
            left_files=len(place.left_files() - files_before),
            last_words=f"no step for {settings.time_limit:g} s" if under.stuck else left.last_words,
            seconds=seconds,
            step_seconds=step_seconds,
            recoveries=under.recoveries,
        )


def soaked_job(job: Job, faults: int) -> Job:
    """Return the job of a soak: ordered sums, enough restarts, none of its own injected faults."""
    checkpoint = replace(job.run.checkpoint or Checkpointing(), folder=None, resume="never", best=None)
    run = replace(
        job.run,
        reduction="ordered",
        checkpoint=checkpoint,
        inject=(),
        max_restarts=10 * faults,
        elastic=False,
        log=(),
        check=False,
    )
    return replace(job, run=run)


def _with_steps(job: Job, steps: int, every: int) -> Job:
    """Return the job with a number of steps and a checkpoint interval."""
    assert job.run.checkpoint is not None
    run = replace(job.run, checkpoint=replace(job.run.checkpoint, every=every))
    return replace(job, recipe=shortened(job.recipe, steps), run=run)


def _for_faults(job: Job, folder: Path, ranks: int, *, resume: str = "never") -> Job:
    """Return the job with ranks that commit faults on request, and a short hang limit."""
    assert job.run.checkpoint is not None
    inject = tuple(
        Inject(rank=rank, step=0, fault=fault, when=fault_file(folder, rank, fault))
        for rank in range(ranks)
        for fault in INJECTED
    )
    run = replace(
        job.run,
        checkpoint=replace(job.run.checkpoint, resume=resume),
        hang_limit=min(job.run.hang_limit or _HANG_LIMIT, _HANG_LIMIT),
        inject=inject,
    )
    return replace(job, run=run)


def _undisturbed(place: SoakRunner, name: str, job: Job, settings: SoakSettings) -> FinishedRun:
    watched = UnderFaults(plan=(), stuck_after=settings.time_limit)
    left = place.train(name, job, watched.disturb)
    if watched.stuck:
        raise UserError(
            f"the undisturbed run took no step for {settings.time_limit:g} s; use a longer --time-limit:\n"
            f"{left.output}"
        )
    if left.code != 0:
        raise UserError(f"the undisturbed run failed, with exit code {left.code}:\n{left.output}")
    return left


def _step_seconds(left: FinishedRun) -> float:
    seconds = [line["step_seconds"] + line["data_seconds"] for line in json_lines(left.folder / METRICS_FILE).values]
    return max(1e-4, median(seconds[len(seconds) // 2 :]))


def _samples(undisturbed: FinishedRun, left: FinishedRun) -> tuple[int, int]:
    """Count the samples of steps that are missing in the run under faults, and of repeated ones."""
    undisturbed_samples = {
        line["step"]: line["samples"] for line in json_lines(undisturbed.folder / METRICS_FILE).values
    }
    taken = Counter(line["step"] for line in json_lines(left.folder / METRICS_FILE).values)
    lost = sum(samples for step, samples in undisturbed_samples.items() if not taken[step])
    return lost, sum(samples * max(0, taken[step] - 1) for step, samples in undisturbed_samples.items())
