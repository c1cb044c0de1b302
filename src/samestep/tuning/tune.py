"""Try settings one after another, each value in processes of its own, and keep what is faster."""

import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from samestep import door, environment, subprocess_group
from samestep.comparison.results import explain
from samestep.durations import check_seconds
from samestep.errors import RankFailedError, UserError, closest
from samestep.job import Job
from samestep.jobfile import to_run
from samestep.limits import MOST_REPEATS, check_whole
from samestep.progress import phases
from samestep.progress.bars import Bar
from samestep.run_folder import METRICS_FILE, json_lines
from samestep.tasks.base import Task
from samestep.tuning.results import Status, Timing, TuningResult, TuningRow
from samestep.tuning.settings import SETTINGS, Setting, SettingCandidate

TIME_LIMIT = 600.0  # seconds of one trial
_FIRST = 3  # steps that are not timed: state and buffers are made in two of them, and bytes are counted in the third
_LEAST = 1.02  # how many times as fast a value must be to be kept, where the repeats differ less than that

# Seconds of a step of a job that starts with some variables. Raises TrialError.
Measure = Callable[[Job, Mapping[str, str]], float]


class TrialError(Exception):
    """A trial that ended without a timing."""

    def __init__(self, status: Status, reason: str) -> None:
        super().__init__(reason)
        self.status: Status = status


@phases.command("tune")
def tune_job(
    job: Job,
    *,
    settings: Sequence[str] | None = None,
    steps: int = 10,
    repeats: int = 3,
    time_limit: float = TIME_LIMIT,
) -> TuningResult:
    """Tune a job's `run:` section for its layout on this machine.

    `settings`: names of those to try, None: all. `steps` are taken by each trial, of which the first three are not
    timed; each value is tried `repeats` times, in turns with what was best before. Raises UserError for a mistake in
    the job or in what is asked for; a value that fails is a row.
    """
    chosen = _chosen(settings)
    if steps <= _FIRST:
        raise UserError(
            f"steps is {steps}, and the first {_FIRST} of a trial are not timed; use {_FIRST + 1} or more"
        )
    check_whole("steps", steps)
    check_whole("repeats", repeats, most=MOST_REPEATS)
    check_seconds(time_limit=time_limit)
    task = _check(job)
    job = replace(job, run=replace(job.run, layout=str(door.layout_of(job)), processes=None))
    with TemporaryDirectory(prefix="samestep-tune-") as folder, subprocess_group.signals_raise():
        trials = _Trials(Path(folder), steps, time_limit)
        result = greedy(job, chosen, trials.seconds, repeats=repeats, task=task)
        return replace(result, remarks=trials.remarks)


def _chosen(names: Sequence[str] | None) -> list[Setting]:
    """The settings to try. Raises UserError for a name that there isn't."""
    table = {setting.name: setting for setting in SETTINGS}
    if names is None:
        return list(SETTINGS)
    for name in names:
        if name not in table:
            raise UserError(f'settings: there is no "{name}" to try; {closest(name, table)}')
    if not names:
        raise UserError(f"settings names none; known: {', '.join(table)}")
    return [setting for setting in SETTINGS if setting.name in names]


def _check(job: Job) -> Task:
    """Check the job as `train` does, once for all trials."""
    if environment.ranks() is not None:
        raise UserError("tune starts its own processes; start it without a launcher")
    if not isinstance(job.recipe.task, str):
        raise UserError(
            f"recipe.task is {job.recipe.task!r}; tune starts each trial as a command, which wants the task's name, "
            'such as "my_task.py:MyTask"'
        )
    ready = door.check(job)
    door.hold_contract(ready)  # once for all trials
    return ready.task


def greedy(
    job: Job, settings: Sequence[Setting], measure: Measure, *, repeats: int, task: Task | None = None
) -> TuningResult:
    """Try one setting after another on top of the best so far; a value is kept where it is faster than the noise.

    What changes the result is tried last, with the settings that were kept, and not kept itself.
    """
    layout = door.layout_of(job)
    variables: dict[str, str] = {}
    rows: list[TuningRow] = []
    best = SettingCandidate(value="")
    first = last = None
    with Bar("tune", len(settings)) as bar:
        for setting in sorted(settings, key=lambda setting: not setting.keeps_result):
            bar.say(setting.name)
            tried, before = _compared(job, variables, setting.candidates(job, layout), measure, repeats, task)
            if before is not None:
                first, last = first or before, before
            kept = _fastest(tried, before) if setting.keeps_result else None
            rows += [_row(setting, candidate, result, before, kept=candidate is kept) for candidate, result in tried]
            if kept is not None:
                best, variables = kept, {**variables, **kept.environment}
                job = best.of(job)
                last = next(result for candidate, result in tried if candidate is kept and isinstance(result, Timing))
            bar.advance()
    if first is None or last is None:
        first = last = Timing(repeats=tuple(_measured(measure, job, variables) for _ in range(repeats)))
    return TuningResult(job=job, at_first=first, at_last=last, rows=rows, environment=variables)


def _measured(measure: Measure, job: Job, variables: Mapping[str, str]) -> float:
    """Return the seconds of a step of the unchanged job. A failure here is the job's, not a setting's."""
    try:
        return measure(job, variables)
    except TrialError as error:
        if error.status == "refused":
            raise UserError(str(error)) from None
        raise RankFailedError(0, str(error)) from None


Found = list[tuple[SettingCandidate, Timing | TrialError]]


def _compared(
    job: Job,
    variables: Mapping[str, str],
    candidates: Sequence[SettingCandidate],
    measure: Measure,
    repeats: int,
    task: Task | None,
) -> tuple[Found, Timing | None]:
    """Time each candidate and the unchanged job, in turns; a failed candidate has its error."""
    ended: dict[int, TrialError] = {}
    for number, candidate in enumerate(candidates):
        if (error := _refused(candidate, job, task)) is not None:
            ended[number] = error
    seconds: dict[int, list[float]] = {number: [] for number in range(-1, len(candidates))}  # -1: the job as it is
    order = deque(number for number in seconds if number not in ended)
    if len(order) == 1:
        return [(candidate, ended[number]) for number, candidate in enumerate(candidates)], None
    for _ in range(repeats):
        for number in list(order):
            if number in ended:
                continue
            if number < 0:
                seconds[number].append(_measured(measure, job, variables))
                continue
            candidate = candidates[number]
            try:
                seconds[number].append(measure(candidate.of(job), {**variables, **candidate.environment}))
            except TrialError as error:
                ended[number] = error
        order.rotate(-1)  # who comes first in one repeat comes last in the next
    tried: Found = [
        (candidate, ended.get(number) or Timing(repeats=tuple(seconds[number])))
        for number, candidate in enumerate(candidates)
    ]
    return tried, Timing(repeats=tuple(seconds[-1]))


def _refused(candidate: SettingCandidate, job: Job, task: Task | None) -> TrialError | None:
    """Why a value can't be tried, as far as it is known before any process starts."""
    if candidate.missing is not None:
        return TrialError("not installed", candidate.missing)
    try:
        if task is not None:
            door.check(candidate.of(job), task=task)
    except UserError as error:
        return TrialError("refused", str(error))
    return None


def _fastest(tried: Found, before: Timing | None) -> SettingCandidate | None:
    """The value that is faster than what was best before, by more than the repeats differ; None where none is."""
    timed = [(candidate, result) for candidate, result in tried if isinstance(result, Timing)]
    if before is None or not timed:
        return None
    candidate, timing = min(timed, key=lambda pair: pair[1].seconds)
    least_gain = max(_LEAST, 1 + max(timing.noise, before.noise))
    return candidate if before.seconds / timing.seconds > least_gain else None


def _row(
    setting: Setting, candidate: SettingCandidate, result: Timing | TrialError, before: Timing | None, *, kept: bool
) -> TuningRow:
    """Build a value's row: its speedup, or why it could not be tried."""
    if isinstance(result, TrialError):
        return TuningRow(setting=setting.name, value=candidate.value, status=result.status, reason=str(result))
    status: Status = "kept" if kept else "not better" if setting.keeps_result else "changes the result"
    return TuningRow(setting=setting.name, value=candidate.value, status=status, timing=result, before=before)


class _Trials:
    """Runs trials one at a time, each a short training in a new folder."""

    def __init__(self, folder: Path, steps: int, time_limit: float) -> None:
        self._folder = folder
        self._steps = steps
        self._time_limit = time_limit
        self._count = 0
        self.remarks: tuple[str, ...] = ()  # messages of trials that ended well

    def seconds(self, job: Job, variables: Mapping[str, str]) -> float:
        """Median seconds of a step, its data's included. Raises TrialError."""
        self._count += 1
        place = self._folder / str(self._count)
        place.mkdir()
        file, folder = place / "job.yaml", place / "run"
        file.write_text(to_run(self._short(job)), encoding="utf-8")
        train = [sys.executable, "-m", "samestep", "train", str(file), "--folder", str(folder)]
        before = ["env", *(f"{name}={value}" for name, value in variables.items())] if variables else []
        outcome = subprocess_group.run([*before, *train], limit=self._time_limit)
        if outcome.code != 0:
            status, reason = explain(folder, outcome, self._time_limit)
            raise TrialError(status, reason)
        self.remarks = subprocess_group.distinct((*self.remarks, *outcome.remarks))
        steps = json_lines(folder / METRICS_FILE).values
        values = steps[_FIRST:]
        if not values:
            raise TrialError(
                "failed", f"the training has {len(steps)} steps, of which the first {_FIRST} don't count"
            )
        return median(value["step_seconds"] + value["data_seconds"] for value in values)

    def _short(self, job: Job) -> Job:
        """Return a job with `steps` steps and nothing else: no checkpoints, no restarts, one evaluation at most."""
        evaluation = replace(job.recipe.evaluation, every=None)
        recipe = replace(job.recipe, steps=self._steps, epochs=None, evaluation=evaluation)
        alone = {"check": False, "log": (), "rank_lines": False, "profile": None, "folder": None}
        never = {"checkpoint": None, "max_restarts": 0, "elastic": False, "min_processes": 1, "inject": ()}
        return replace(job, recipe=recipe, run=replace(job.run, **alone, **never))
