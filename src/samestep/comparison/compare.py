"""`samestep.compare`: runs each method's job in processes of its own, in turn, and makes the rows of the table.

A method that can't train the job has the reason in its row.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from samestep import door, environment, subprocess_group
from samestep.comparison import results
from samestep.comparison.methods import METHODS, SINGLE, ComparedMethod, chosen
from samestep.comparison.results import Comparison, ComparisonRow, explain, machine
from samestep.comparison.runs import run_method
from samestep.comparison.same_step import STEPS, References, SameStep, best, short_job, unevaluated
from samestep.durations import check_seconds
from samestep.engines.registry import engine_names, resolve
from samestep.errors import RankFailedError, UserError
from samestep.extras import is_installed
from samestep.job import Job, Run
from samestep.launch.affinity import cores
from samestep.launch.device import accelerators, check_devices
from samestep.limits import MOST_RANKS_A_HOST, MOST_REPEATS, check_whole
from samestep.progress import phases
from samestep.progress.bars import Bar
from samestep.recipe import Recipe
from samestep.run_folder import MODEL_FILE
from samestep.tasks.base import Task
from samestep.validation import checked


@dataclass(frozen=True, kw_only=True)
class MethodJob:
    """A method and its job."""

    row: ComparisonRow  # as it is before anything ran
    job: Job
    precisions: frozenset[str] = frozenset()


def entries(job: Job, task: Task, methods: Sequence[ComparedMethod], budget: int) -> list[MethodJob]:
    """Build a job for each method, with its share of `budget` cores."""
    return [_entry(job, task, method, budget) for method in methods]


def cores_of(job: Job, processes: int) -> int:
    """Return the cores that all processes of a method share: all of the machine's, unless threads were requested."""
    threads = job.run.threads or environment.asked_threads()
    return threads * processes if threads else cores()


def _entry(job: Job, task: Task, method: ComparedMethod, budget: int) -> MethodJob:
    """Build a method's job: the recipe with the method's `run:` section; or give the reason why it can't run."""
    size = method.sizes.size
    threads = max(1, (method.cores or budget) // size)
    recipe = job.recipe if method.precision is None else replace(job.recipe, precision=method.precision)
    row = ComparisonRow(method=method, processes=size, threads=threads, precision=recipe.precision, status="measured")
    ours = method.start.precisions is None
    run = replace(
        job.run,
        layout=method.layout,
        processes=None,
        engine=method.engine if ours else "native",
        engine_config=job.run.engine_config if job.run.engine == method.engine else None,
        threads=threads,
        cut_at=job.run.cut_at if method.sizes.pipeline > 1 else None,
        check=False,
        bucket_mb=None,  # DDP's gradient buckets only
        profile=None,
        log=(),
        rank_lines=False,
        folder=None,
    )
    run = replace(run, **method.run)
    own_job = replace(job, recipe=recipe, run=run)
    if ours and (missing := _missing(method.engine)):
        return MethodJob(row=replace(row, status="not installed", reason=missing), job=own_job)
    if refused := _refused(own_job, task, method):
        return MethodJob(row=replace(row, status="refused", reason=refused), job=own_job)
    abilities = resolve(method.engine).abilities if ours else None
    return MethodJob(
        row=replace(row, synchronous=getattr(abilities, "same_step", True)),
        job=own_job,
        precisions=method.start.precisions or (abilities.precisions if abilities else frozenset()),
    )


def _missing(engine: str) -> str | None:
    """Return why an engine is missing here, with the command that installs it; None if it is installed."""
    if engine not in engine_names():
        return f'engine "{engine}" is not part of this samestep'
    for module, command in resolve(engine).abilities.packages.items():
        if not is_installed(module):
            return f"it needs {module}: {command}"
    return None


def _refused(job: Job, task: Task, method: ComparedMethod) -> str | None:
    """Return why a method can't train this job; None if it can."""
    if method.cores is not None and job.run.device == "auto" and accelerators():
        return "it is for CPUs, and the job runs on an accelerator; use --device cpu"
    if method.start.precisions is not None:
        if job.run.compile and not method.start.compiles:
            return f"run.compile is true, and {method.name}'s script doesn't compile"
        if job.recipe.precision not in method.start.precisions:
            return f"recipe.precision is {job.recipe.precision}, which the handwritten methods don't have"
    try:
        door.check(job, task=task)
    except UserError as error:
        return str(error)
    return None


TIME_LIMIT = 3600.0  # seconds of one run


def compare(
    recipe: Recipe,
    *,
    methods: Sequence[str | ComparedMethod] | None = None,
    processes: int | None = None,
    repeats: int = 3,
    evaluations: int = 1,
    time_limit: float = TIME_LIMIT,
    **run: Any,
) -> Comparison:
    """Train a recipe by several methods, each in processes of its own, and hold them side by side.

    `methods` are names such as "single", "ddp-torchrun" or "deepspeed-zero2", pairs such as "native:dp2 tp2", or a
    `ComparedMethod` of one's own; None: those of the published comparison, and samestep's layouts. `evaluations` of
    each training are spread over its steps, outside its time. `run` takes keys of a job file's `run:` section, of
    which methods set layout, engine and processes. Raises UserError for a mistake in the job; a method that fails is
    a row.
    """
    job = Job(recipe=recipe, run=checked(Run, run, prefix=("run",)))
    return compare_job(
        job, methods=methods, processes=processes, repeats=repeats, evaluations=evaluations, time_limit=time_limit
    )


@phases.command("compare")
def compare_job(
    job: Job,
    *,
    methods: Sequence[str | ComparedMethod] | None = None,
    processes: int | None = None,
    repeats: int = 3,
    evaluations: int = 1,
    time_limit: float = TIME_LIMIT,
) -> Comparison:
    """Compare methods on a job; the job's own layout and engine are ignored."""
    processes = _processes(job, processes)
    check_whole("repeats", repeats, most=MOST_REPEATS)
    check_whole("evaluations", evaluations)
    check_seconds(time_limit=time_limit)
    picked = chosen(methods, processes)
    task = _check(job)
    budget = cores_of(job, processes)
    planned = entries(_evaluated(job, task, evaluations), task, picked, budget)
    with TemporaryDirectory(prefix="samestep-compare-") as folder, subprocess_group.signals_raise():
        alone = _reference_entry(job, task, budget)
        runner = _Runner(Path(folder), time_limit, References(alone.job, task, STEPS, Path(folder)))
        rows = runner.all_rows(planned, alone, repeats)
    return Comparison(job=job, processes=processes, cores=budget, repeats=repeats, rows=rows, machine=machine())


def _processes(job: Job, asked_processes: int | None) -> int:
    """As many as asked for, or as there are accelerators, or cores."""
    processes = asked_processes if asked_processes is not None else job.run.processes
    if processes is None:
        processes = (accelerators() if job.run.device == "auto" else 0) or cores()
    check_whole("processes", processes, most=MOST_RANKS_A_HOST)
    check_devices(processes, job.run.device)
    return processes


def _check(job: Job) -> Task:
    """Check the job with one process, and return its task. Raises UserError if one process can't train it."""
    if environment.ranks() is not None:
        raise UserError("compare starts its own processes; start it without a launcher")
    if not isinstance(job.recipe.task, str):
        raise UserError(
            f"recipe.task is {job.recipe.task!r}; compare starts each method as a command, which wants the task's "
            'name, such as "my_task.py:MyTask"'
        )
    if job.recipe.communication is not None:
        raise UserError(
            f"recipe.communication is {job.recipe.communication.kind}, with which no two methods take the same step; "
            "compare without it, and use benchmarks/compression.py for it"
        )
    alone = replace(job, run=Run(device=job.run.device))
    ready = door.check(alone)
    if job.run.check:  # once for all methods
        door.hold_contract(ready)
    return ready.task


def _evaluated(job: Job, task: Task, evaluations: int) -> Job:
    """Return the job with `evaluations` evaluations, unless `recipe.evaluation.every` is set."""
    recipe = job.recipe
    if evaluations == 1 or recipe.evaluation.every is not None:
        return job
    steps = recipe.total_steps(-(-len(task.train_set()) // recipe.batch))
    every = -(-steps // evaluations)
    return replace(job, recipe=replace(recipe, evaluation=replace(recipe.evaluation, every=every)))


def _reference_entry(job: Job, task: Task, budget: int) -> MethodJob:
    """Build the reference job: one process in float64, for the first steps."""
    single = next(method for method in METHODS if method.name == SINGLE)
    (entry,) = entries(short_job(job, "fp64"), task, [single], budget)
    return entry


class _Runner:
    """Runs the methods' jobs one at a time, each in a new subfolder of `folder`."""

    def __init__(self, folder: Path, time_limit: float, references: References) -> None:
        self._references = references
        self._folder = folder
        self._time_limit = time_limit
        self._count = 0

    def all_rows(self, planned: Sequence[MethodJob], reference: MethodJob, repeats: int) -> list[ComparisonRow]:
        """Run the first steps of every method, which also warms up the machine; then the repeats, interleaved."""
        rows = {entry.row.method: entry.row for entry in planned}
        runnable = [entry for entry in planned if entry.row.status == "measured"]
        with Bar("compare", 1 + len(runnable) * (1 + repeats)) as bar:
            bar.say("the reference: one process in float64")
            reference_norms = self._reference(reference)
            bar.advance()
            turns = _turns(runnable, repeats)
            for take, entry in turns:
                row = rows[entry.row.method]
                if row.status == "measured":
                    bar.say(f"{row.method.name}, {'first steps' if take == 0 else f'repeat {take} of {repeats}'}")
                    rows[row.method] = (
                        self._held(entry, row, reference_norms) if take == 0 else self._measured(entry, row)
                    )
                bar.advance()
        return list(rows.values())

    def _reference(self, entry: MethodJob) -> list[float]:
        """Return the losses of one process in float64. A failure here is the job's, not a method's, and is raised."""
        folder, outcome = self._run(entry.row.method, entry.job)
        if outcome.code == 0:
            return results.losses(folder)
        status, reason = explain(folder, outcome, self._time_limit)
        if status == "refused":
            raise UserError(reason)
        raise RankFailedError(0, outcome.output or reason)

    def _held(self, entry: MethodJob, row: ComparisonRow, reference_norms: Sequence[float]) -> ComparisonRow:
        """Run the method's first steps, and add their comparison with the reference to the row."""
        if not row.synchronous:
            return row
        precision = row.method.precision or best(entry.precisions)

        def read(folder: Path, seconds: float) -> ComparisonRow:
            """Compare the losses, gradient norms and parameters of a short run with the reference."""
            held = SameStep(
                precision=precision,
                losses=results.losses(folder),
                reference=reference_norms,
                parameters=self._references.hold(folder / MODEL_FILE, precision),
                norms=self._references.hold_norms(results.grad_norms(folder), precision),
            )
            return replace(row, same_step=held)

        return self._ended(row, short_job(entry.job, precision), read)

    def _measured(self, entry: MethodJob, row: ComparisonRow) -> ComparisonRow:
        """Run one more repeat, and add its figures to the row.

        Only the first repeat evaluates, since the others take the same steps; with early stopping every repeat does.
        """
        measured_before = row.runs and entry.job.recipe.early_stop is None
        job = unevaluated(entry.job) if measured_before else entry.job

        def read(folder: Path, seconds: float) -> ComparisonRow:
            return replace(row, runs=(*row.runs, results.read(folder, seconds)))

        return self._ended(row, job, read)

    def _ended(self, row: ComparisonRow, job: Job, read: Callable[[Path, float], ComparisonRow]) -> ComparisonRow:
        """Run a job and read its results; on any failure the row has the reason."""
        folder, outcome = self._run(row.method, job)
        try:
            if outcome.code == 0:
                remarks = subprocess_group.distinct((*row.remarks, *outcome.remarks))
                return replace(read(folder, outcome.seconds), remarks=remarks)
            status, reason = explain(folder, outcome, self._time_limit)
        except (OSError, ValueError, KeyError) as error:  # exit code 0, but the run's files are incomplete
            status, reason = "failed", f"what it left can't be read: {error!r}"
        return replace(row, status=status, reason=reason, output=outcome.output)

    def _run(self, method: ComparedMethod, job: Job) -> tuple[Path, subprocess_group.CommandOutcome]:
        """Run a job in a folder of its own."""
        self._count += 1
        place = self._folder / str(self._count)
        place.mkdir()
        return run_method(method, job, place, limit=self._time_limit)


def _turns(planned: Sequence[MethodJob], repeats: int) -> Iterator[tuple[int, MethodJob]]:
    """Yield take 0 (the first steps) of every method, then each repeat; the order rotates by one method a take."""
    order = deque(planned)
    for take in range(repeats + 1):
        for entry in order:
            yield take, entry
        order.rotate(-1)
