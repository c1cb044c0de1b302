"""A soak: one long job with ordered sums under many faults at random moments, beside an undisturbed run of it.

The faults come from outside, as they do: signals to a rank, to the process that looks after the ranks, or to all.
"""

import math
import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory, gettempdir
from typing import Any

import psutil

from samestep import environment, subprocess_group
from samestep.api import check_job, layout_of
from samestep.drill.drill import Left, Runs, lines
from samestep.errors import UserError, closest
from samestep.fault_tolerance.scratch import left_in
from samestep.fault_tolerance.status import read
from samestep.job import Checkpointing, Job
from samestep.training.metrics_log import Bar

_CALIBRATION = 40  # steps by which a step's time is found
_MARGIN = 1.5  # of steps: a machine that others use may be faster later than when a step was timed
_FEWEST_STEPS = 8
_PAUSE = 1.0  # seconds
_HANG_LIMIT = 10.0  # seconds; the job's own limit is made to be waited for once, not in every fault
_END_GRACE = 3.0  # seconds for the ranks to end, once what looks after them has
_ROUNDS = "samestep-agent-*/round-*"  # where ranks write their status


class Target:
    """The processes of a job that runs."""

    def __init__(self, started: subprocess.Popen[bytes], processes: int) -> None:
        self.started = started
        self._processes = processes

    def tree(self) -> list[int]:
        """The process that was started, and all that descend from it."""
        found = [self.started.pid]
        with suppress(psutil.NoSuchProcess):
            found += [each.pid for each in psutil.Process(self.started.pid).children(recursive=True)]
        return found

    def ranks(self) -> list[int]:
        """The processes of the ranks that have said anything yet."""
        mine = set(self.tree())
        places = Path(gettempdir()).glob(_ROUNDS)
        return [each.pid for place in places for each in read(place, range(self._processes)) if each.pid in mine]


def _signalled(number: signal.Signals) -> Callable[[Target, random.Random], bool]:
    def commit(target: Target, draw: random.Random) -> bool:
        ranks = target.ranks()
        if not ranks:
            return False
        with suppress(ProcessLookupError):
            os.kill(draw.choice(sorted(ranks)), number)
            return True
        return False

    return commit


def _pause(target: Target, draw: random.Random) -> bool:
    ranks = target.ranks()
    if not ranks:
        return False
    rank = draw.choice(sorted(ranks))
    with suppress(ProcessLookupError):
        os.kill(rank, signal.SIGSTOP)
        time.sleep(_PAUSE)
        os.kill(rank, signal.SIGCONT)
        return True
    return False


def _terminate(target: Target, draw: random.Random) -> bool:
    target.started.send_signal(signal.SIGTERM)
    return True


def _gone(target: Target, draw: random.Random) -> bool:
    for pid in target.tree():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return True


@dataclass(frozen=True, kw_only=True)
class Disturbance:
    """A kind of fault; `commit` says whether it could be committed now."""

    does: str
    commit: Callable[[Target, random.Random], bool]
    ends_job: bool = False  # after it the same command is run once more, as a scheduler does


KINDS: Mapping[str, Disturbance] = {
    "kill": Disturbance(does="a rank gets SIGKILL", commit=_signalled(signal.SIGKILL)),
    "crash": Disturbance(does="a rank gets SIGABRT", commit=_signalled(signal.SIGABRT)),
    "hang": Disturbance(does="a rank is stopped for good", commit=_signalled(signal.SIGSTOP)),
    "pause": Disturbance(does="a rank is stopped for a second", commit=_pause),
    "terminate": Disturbance(does="the job gets SIGTERM, and is started again", commit=_terminate, ends_job=True),
    "gone": Disturbance(does="all processes get SIGKILL, and the job is started again", commit=_gone, ends_job=True),
}


@dataclass(kw_only=True)
class Soak:
    """The run under faults, as it goes."""

    wanted: int
    between: float  # seconds
    kinds: Sequence[str]
    draw: random.Random
    processes: int
    committed: Counter[str] = field(default_factory=Counter)
    recoveries: list[float] = field(default_factory=list)  # seconds until a step beyond those before the fault
    left_processes: int = 0
    _waiting: tuple[float, int] | None = None  # the last fault's moment, and the last step before it
    _ends: str = ""  # the kind that has just ended the job

    def disturb(self, started: subprocess.Popen[bytes], folder: Path) -> None:
        """Commit faults until the job ends, or there are enough, and look at what is left of it then."""
        target, self._ends, tree = Target(started, self.processes), "", [started.pid]
        due, before = math.inf, _last_step(folder)
        while started.poll() is None:
            self._look(folder)
            if due == math.inf and _last_step(folder) != before:  # its ranks are at work
                due = self._next()
            if not self._ends:
                tree = target.tree()
            if not self._ends and self.committed.total() < self.wanted and time.monotonic() >= due:
                due = self._next() if self._commit(target, folder) else time.monotonic() + 0.05
            time.sleep(0.05)
        if self._ends != "gone":
            self.left_processes += _still_there(tree)

    def _next(self) -> float:
        return time.monotonic() + self.draw.uniform(0.5, 1.5) * self.between

    def _commit(self, target: Target, folder: Path) -> bool:
        name = self.draw.choice(list(self.kinds))
        step, moment = _last_step(folder), time.monotonic()
        if not KINDS[name].commit(target, self.draw):
            return False
        self.committed[name] += 1
        self._waiting = (moment, step) if self._waiting is None else (self._waiting[0], max(step, self._waiting[1]))
        if KINDS[name].ends_job:
            self._ends = name
        return True

    def _look(self, folder: Path) -> None:
        """Whether the job has come beyond where it was when the last fault came."""
        if self._waiting is not None and _last_step(folder) > self._waiting[1]:
            self.recoveries.append(time.monotonic() - self._waiting[0])
            self._waiting = None

    def goes_on(self, left: Left) -> bool:
        """Whether a run has ended as its last fault has it end, and the job is to be started again."""
        return self._ends != "" and left.code is not None and left.code != 0


def _last_step(folder: Path) -> int:
    """The last step that is recorded; the end of the file is read alone, since it grows long."""
    file = folder / "metrics.jsonl"
    if not file.is_file():
        return -1
    with file.open("rb") as content:
        content.seek(max(0, file.stat().st_size - 4096))
        tail = content.read().decode("utf-8", errors="replace").splitlines()
    steps = [part.split(",")[0] for part in (line.partition('"step": ')[2] for line in tail) if part]
    return max((int(step) for step in steps if step.isdecimal()), default=-1)


def _still_there(pids: Sequence[int]) -> int:
    """How many processes are left a while after the one that looked after them; a zombie is none."""
    until = time.monotonic() + _END_GRACE
    while (left := [pid for pid in pids if _lives(pid)]) and time.monotonic() < until:
        time.sleep(0.05)
    return len(left)


def _lives(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    return False


@dataclass(frozen=True, kw_only=True)
class Soaked:
    """What came of a soak."""

    layout: str
    steps: int
    seed: int
    between: float  # seconds
    wanted: int
    faults: Mapping[str, int]  # committed, by kind
    ended: bool  # the run under faults took its last step
    same_weights: bool  # bit for bit those of the undisturbed run
    same_losses: bool
    samples_lost: int
    samples_repeated: int
    goodput: float  # seconds of the undisturbed run / seconds of this one, starts and all
    slowest_recovery: float | None  # seconds from a fault to a step that was not taken before it
    median_recovery: float | None
    left_processes: int
    left_files: int
    last_words: str

    @property
    def passed(self) -> bool:
        lost = self.samples_lost or self.samples_repeated or self.left_processes or self.left_files
        enough = sum(self.faults.values()) >= self.wanted
        return self.ended and enough and self.same_weights and self.same_losses and not lost

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "passed": self.passed}


def kinds_of(names: Sequence[str] | None) -> list[str]:
    """The kinds of these names; all without names. Raises UserError."""
    found = [name.strip() for name in names] if names is not None else list(KINDS)
    for name in found:
        if name not in KINDS:
            raise UserError(f'unknown fault "{name}" of a soak; {closest(name, list(KINDS))}')
    return found


def soak_job(
    job: Job,
    *,
    faults: int,
    seed: int = 0,
    between: float = 15.0,
    kinds: Sequence[str] | None = None,
    steps: int | None = None,
    time_limit: float = 600,
) -> Soaked:
    """Train a job undisturbed, and once more under so many faults, `between` seconds apart on average.

    `steps`: None for as many as the faults take. Raises UserError for what is wrong with the job, also where the
    undisturbed run fails.
    """
    if environment.ranks() is not None:
        raise UserError("drill starts its own processes; start it without a launcher")
    if faults < 1:
        raise UserError(f"--soak is {faults}; use a number of faults of 1 or more")
    if not between > 0:
        raise UserError(f"--between is {between:g}; use seconds above 0, such as 15s")
    if steps is not None and steps < _FEWEST_STEPS:
        raise UserError(f"--steps is {steps}; use {_FEWEST_STEPS} or more")
    if not time_limit > 0:
        raise UserError(f"--time-limit is {time_limit:g}; use a number of seconds above 0")
    names = kinds_of(kinds)
    job = _of(job, faults)
    layout = layout_of(job)
    check_job(job)
    with (
        TemporaryDirectory(prefix="samestep-drill-") as place,
        subprocess_group.signals_raise(),
        Bar("soak", faults) as bar,
    ):
        runs = Runs(job=job, place=Path(place), time_limit=time_limit, step=0, rank=0)
        bar.say("undisturbed")
        step_seconds = _step_seconds(
            _undisturbed(replace(runs, job=_with_steps(job, _CALIBRATION, 10)), "calibration")
        )
        total = steps or max(_CALIBRATION, math.ceil(_MARGIN * faults * between / step_seconds))
        runs = replace(runs, job=_with_steps(job, total, max(1, round(1 / step_seconds))))
        began = time.monotonic()
        undisturbed = _undisturbed(runs, "undisturbed")
        quiet_seconds = time.monotonic() - began
        limit = min(job.run.hang_limit or _HANG_LIMIT, _HANG_LIMIT)
        soak = Soak(wanted=faults, between=between, kinds=names, draw=random.Random(seed), processes=layout.size)
        bar.say("under faults")
        files_before, began = left_in(), time.monotonic()
        left = runs.train("soak", meanwhile=soak.disturb, hang_limit=limit)
        while soak.goes_on(left):
            left = runs.train("soak", meanwhile=soak.disturb, resume="auto", hang_limit=limit)
        seconds = time.monotonic() - began
        for _ in range(soak.committed.total()):
            bar.advance()
        lost, repeated = _samples(undisturbed, left)
        return Soaked(
            layout=str(layout),
            steps=total,
            seed=seed,
            between=between,
            wanted=faults,
            faults=dict(sorted(soak.committed.items())),
            ended=left.code == 0,
            same_weights=left.weights != b"" and left.weights == undisturbed.weights,
            same_losses=left.losses == undisturbed.losses,
            samples_lost=lost,
            samples_repeated=repeated,
            goodput=quiet_seconds / seconds,
            slowest_recovery=max(soak.recoveries, default=None),
            median_recovery=median(soak.recoveries) if soak.recoveries else None,
            left_processes=soak.left_processes,
            left_files=len(set(left_in()) - set(files_before)),
            last_words=left.last_words,
        )


def _of(job: Job, faults: int) -> Job:
    """The job as it is soaked: ordered sums, restarts enough, and none of its own faults."""
    checkpoint = replace(job.run.checkpoint or Checkpointing(), folder=None, resume="never", best=None)
    run = replace(
        job.run,
        reduction="ordered",
        checkpoint=checkpoint,
        inject=(),
        max_restarts=10 * faults,
        elastic=False,
        tensorboard=False,
        check=False,
    )
    return replace(job, run=run)


def _with_steps(job: Job, steps: int, every: int) -> Job:
    assert job.run.checkpoint is not None
    run = replace(job.run, checkpoint=replace(job.run.checkpoint, every=every))
    return replace(job, recipe=replace(job.recipe, steps=steps, epochs=None), run=run)


def _undisturbed(runs: Runs, name: str) -> Left:
    left = runs.train(name)
    if left.code != 0:
        raise UserError(f"the undisturbed run failed, with exit code {left.code}:\n{left.output}")
    return left


def _step_seconds(left: Left) -> float:
    found = [line["step_seconds"] + line["data_seconds"] for line in lines(left.folder / "metrics.jsonl")]
    return max(1e-4, median(found[len(found) // 2 :]))


def _samples(undisturbed: Left, left: Left) -> tuple[int, int]:
    """Samples of steps that are missing in the records of the run under faults, and of those that stand twice."""
    wanted = {line["step"]: line["samples"] for line in lines(undisturbed.folder / "metrics.jsonl")}
    taken = Counter(line["step"] for line in lines(left.folder / "metrics.jsonl"))
    lost = sum(samples for step, samples in wanted.items() if not taken[step])
    return lost, sum(samples * max(0, taken[step] - 1) for step, samples in wanted.items())
