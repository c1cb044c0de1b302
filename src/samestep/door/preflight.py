"""Preflight checks: find what can't work in a job before any process starts, one message for each mistake."""

from samestep import environment
from samestep.engines import checks
from samestep.engines import registry as engines
from samestep.engines.base import Engine
from samestep.engines.precision import Precision
from samestep.errors import UserError
from samestep.fault_tolerance.policy import check_faults
from samestep.job import Job
from samestep.launch.affinity import chosen, this_machine
from samestep.launch.device import check_devices, device_of
from samestep.launch.environments.registry import check_not_alone
from samestep.layout import Layout
from samestep.loggers.registry import check_loggers
from samestep.parallel.offload.memory import check_offload_folder
from samestep.plausibility import check_lengths
from samestep.progress import phases
from samestep.tasks import TASKS
from samestep.tasks.base import Task, check_data
from samestep.tasks.registry import resolve as resolve_task
from samestep.tasks.turns import turns_of
from samestep.training.early_stop import EarlyStopper
from samestep.training.hooked import check_hooks
from samestep.training.optimizer import check_average_start, check_recipe_optimizers, check_turns_optimizers
from samestep.training.schedule import check_schedules


@phases.status(lambda: "checking the job")
def preflight(job: Job, layout: Layout, task: Task | None = None, *, here: bool = True) -> Task:
    """Check a settled job, and return its task, which is built unless given. Raises UserError for the first mistake.

    The order: the job against its engine and layout, this machine, and last the task, since data and tokenizers take
    time to read. With `here` false all ranks are on other hosts, whose accelerators are not known.
    """
    engine = engines.resolve(job.run.engine)
    checks.check_job(job, engine, layout, device_of(0, job.run.device).type if here else "cpu")
    check_recipe_optimizers(job, engine, layout)
    if environment.ranks() is None:
        check_not_alone(environment.snapshot())
        check_devices(layout.size, job.run.device, may_share=job.run.transport == "gloo")
        if here and layout.size > 1:
            chosen(this_machine(), layout.size, job.run.bind, option="run.bind:")
    if here or job.run.device == "cpu":
        Precision(job.recipe.precision, device_of(0, job.run.device))
    check_faults(job, layout, skips=engine.abilities.skips)
    check_offload_folder(job.run.offload_folder)
    check_loggers(job.run.log, environment.snapshot())
    check_hooks(job.run.hooks)
    layout.check_batch(job.recipe.batch, job.run.micro_batch)
    task = task or resolve_task(job.recipe)
    _check_task(job, engine, layout, task)
    if here:
        engine.make_ready(job, layout)
    return task


@phases.status(lambda: "reading the data")
def _check_task(job: Job, engine: Engine, layout: Layout, task: Task) -> None:
    """Check the task against layout and engine: its model's shape, data, losses, turns and buffers."""
    recipe, run = job.recipe, job.run
    layout.check_model(task.shape())
    if recipe.task not in [*TASKS]:  # shipped tasks check their data themselves
        check_data(task)
    task.check()
    if run.group_by_length and task.sample_lengths() is None:
        raise UserError(
            "run.group_by_length is true, and the task does not say how long its samples are; give it a method "
            "sample_lengths() that returns a number for each training sample, or use group_by_length: false"
        )
    checks.check_task_needs(job, engine, layout, task)
    check_turns_optimizers(turns_of(task), job, layout)
    check_average_start(recipe, len(task.train_set()))
    if recipe.steps is None or recipe.evaluation.every == "epoch":
        check_lengths(job, len(task.train_set()))
    check_schedules(recipe, len(task.train_set()))
    EarlyStopper(recipe.early_stop).check(task)
    engine.check_task(task, layout, run.engine_config)
