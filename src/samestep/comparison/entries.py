"""From methods to what is run: each method's job, or the reason why this job can't be trained so."""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, replace

from samestep import environment
from samestep.api import check_job
from samestep.cluster.cores import cores
from samestep.cluster.device import accelerators
from samestep.comparison.methods import Method
from samestep.comparison.rows import Row
from samestep.engines import ENGINES
from samestep.engines.resolve import resolve
from samestep.errors import UserError
from samestep.job import Job
from samestep.layout import Layout
from samestep.tasks.base import Task


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A method and its job."""

    row: Row  # as it is before anything ran
    job: Job
    precisions: frozenset[str] = frozenset()


def entries(job: Job, task: Task, methods: Sequence[Method], budget: int) -> list[Entry]:
    """An entry a method, each with its part of `budget` cores."""
    return [_entry(job, task, method, budget) for method in methods]


def cores_of(job: Job, processes: int) -> int:
    """Cores that all processes of a method share: as many as there are, unless the user asked for threads."""
    asked = job.run.threads or environment.asked_threads()
    return asked * processes if asked else cores()


def _entry(job: Job, task: Task, method: Method, budget: int) -> Entry:
    size = Layout.parse(method.layout).size
    threads = max(1, (method.cores or budget) // size)
    recipe = job.recipe if method.precision is None else replace(job.recipe, precision=method.precision)
    row = Row(method=method, processes=size, threads=threads, precision=recipe.precision, status="measured")
    ours = method.start.precisions is None
    run = replace(
        job.run,
        layout=method.layout,
        processes=None,
        engine=method.engine if ours else "native",
        engine_config=job.run.engine_config if job.run.engine == method.engine else None,
        threads=threads,
        cut_at=job.run.cut_at if Layout.parse(method.layout).pipeline > 1 else None,
        check=False,
        bucket_mb=None,  # of replicas alone
        profile=None,
        tensorboard=False,
        rank_lines=False,
        folder=None,
    )
    run = replace(run, **method.run)
    mine = replace(job, recipe=recipe, run=run)
    if ours and (missing := _missing(method.engine)):
        return Entry(row=replace(row, status="not installed", reason=missing), job=mine)
    if refused := _refused(mine, task, method):
        return Entry(row=replace(row, status="refused", reason=refused), job=mine)
    abilities = resolve(method.engine).abilities if ours else None
    return Entry(
        row=replace(row, synchronous=getattr(abilities, "same_step", True)),
        job=mine,
        precisions=method.start.precisions or (abilities.precisions if abilities else frozenset()),
    )


def _missing(engine: str) -> str | None:
    """What installs an engine that is not installed."""
    if engine not in ENGINES:
        return f'engine "{engine}" is not part of this samestep'
    for module, command in resolve(engine).abilities.packages.items():
        if importlib.util.find_spec(module) is None:
            return f"it needs {module}: {command}"
    return None


def _refused(job: Job, task: Task, method: Method) -> str | None:
    if method.cores is not None and job.run.device == "auto" and accelerators():
        return "it is for CPUs, and the job runs on an accelerator; --device cpu would do"
    if method.start.precisions is not None:
        if job.run.compile and not method.start.compiles:
            return f"run.compile is true, and {method.name}'s script doesn't compile"
        if job.recipe.precision not in method.start.precisions:
            return f"recipe.precision is {job.recipe.precision}, which the handwritten methods don't have"
    try:
        check_job(job, task)
    except UserError as error:
        return str(error)
    return None
