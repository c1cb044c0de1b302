"""Preflight checks: find what can't work in a job before any process starts, one message for each mistake."""

from samestep import environment
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
from samestep.parallel.compile import check_compile
from samestep.parallel.offload.memory import check_offload_folder
from samestep.tasks import TASKS
from samestep.tasks.base import Task, check_data
from samestep.tasks.losses import with_weights
from samestep.tasks.registry import resolve as resolve_task
from samestep.tasks.turns import turns_of
from samestep.training.early_stop import EarlyStopper
from samestep.training.optimizer import check_average_start, check_optimizers, check_turns_optimizers


def preflight(job: Job, layout: Layout, task: Task | None = None, *, here: bool = True) -> Task:
    """Check a job, and return its task, which is built unless given. Raises UserError for the first mistake.

    The order: the job against its engine and layout, this machine, and last the task, since data and tokenizers take
    time to read. With `here` false all ranks are on other hosts, whose accelerators are not known.
    """
    engine = engines.resolve(job.run.engine)
    _check_engine(job, engine, layout, here=here)
    if environment.ranks() is None:
        check_not_alone(environment.snapshot())
        check_devices(layout.size, job.run.device, may_share=job.run.transport == "gloo")
        if here and layout.size > 1:
            chosen(this_machine(), layout.size, job.run.bind, option="run.bind:")
    if here or job.run.device == "cpu":
        Precision(job.recipe.precision, device_of(0, job.run.device))
    _check_abilities(job, engine, layout)
    check_faults(job, layout, skips=engine.abilities.skips)
    check_offload_folder(job.run.offload_folder)
    layout.check_batch(job.recipe.batch, job.run.micro_batch)
    task = task or resolve_task(job.recipe)
    _check_task(job, engine, layout, task)
    if here:
        engine.make_ready(job, layout)
    return task


def _check_engine(job: Job, engine: Engine, layout: Layout, *, here: bool) -> None:
    """Check the recipe and the run against the engine and this layout."""
    recipe, run = job.recipe, job.run
    engines.check(engine, layout, recipe.precision, run.engine_config)
    engines.check_communication(recipe.communication, engine, layout, recipe.precision)
    engines.check_sparse_rows(run.sparse_rows, engine, layout, recipe.communication)
    engines.check_shared_replicas(job, engine, layout)
    engines.check_master_weights(job, engine, layout)
    engines.check_attention_dropout(job, engine)
    engines.check_reduction(job, engine, layout, device_of(0, run.device).type if here else "cpu")
    check_optimizers(job, engine, layout)


def _check_abilities(job: Job, engine: Engine, layout: Layout) -> None:
    """Check keys that not every engine supports."""
    recipe, run, able, name = job.recipe, job.run, engine.abilities, engine.name
    if run.compile:
        if not able.compiles:
            raise UserError(f'run.compile is true, and engine "{name}" compiles no blocks; use engine native')
        check_compile(layout)
    if run.float32_matmul != "highest" and not able.float32_matmul:
        raise UserError(
            f"run.float32_matmul is {run.float32_matmul}, which is of PyTorch's products, "
            f'and engine "{name}" has its own; use highest'
        )
    engines.check_loss_chunk(run.loss_chunk, engine, layout)
    engines.check_buckets(run.bucket_mb, engine, layout, recipe.communication)
    if run.profile is not None and not able.profiles:
        raise UserError(f'run.profile is given, and engine "{name}" does not support profiling; use engine native')
    if run.transport == "shared-memory" and not able.shared_memory:
        raise UserError(
            f'run.transport is shared-memory, and engine "{name}" has transports of its own; '
            "use engine native, or transport auto"
        )
    if recipe.adapter is not None and not able.adapters:
        raise UserError(f'recipe.adapter is given, and engine "{name}" has no adapters; use engine native')
    if run.checkpoint is not None and not able.checkpoints:
        raise UserError(f'run.checkpoint is given, and engine "{name}" saves no checkpoints here; use engine native')
    if run.cut_at is not None and layout.pipeline == 1:
        raise UserError(f'run.cut_at names pipeline stages, and layout "{layout}" has none; use pp2, or no cut_at')


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
    if task.batch_buffers() and not engine.abilities.batch_buffers:
        raise UserError(f'engine "{engine.name}" keeps no batch_buffers() of a task; use engine native')
    engines.check_ordered_task(job, task)
    engines.check_gather(task.loss, engine, recipe.communication)
    engines.check_several_losses(with_weights(task.loss, task.loss_weights), engine, recipe.communication)
    engines.check_turns(task, engine, layout, job)
    check_turns_optimizers(turns_of(task), job, layout)
    check_average_start(recipe, len(task.train_set()))
    EarlyStopper(recipe.early_stop).check(task)
    engine.check_task(task, layout, run.engine_config)
