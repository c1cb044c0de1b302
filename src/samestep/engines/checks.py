"""Checks a job's keys and task against its engine and layout, before any process starts.

`check_layout` checks the layout, the precision, and that the engine's packages are installed. `check_job` checks the
other keys of recipe and run: `_check_abilities` those that an engine either supports or not, and a function each
those that also depend on the layout or on other keys. `check_task_needs` checks the task, which comes later, since
its data and tokenizers take time to read. A session has no job, and calls those of the keys that it has.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from samestep.communication import Communication
from samestep.engines import ENGINES
from samestep.engines.base import Engine
from samestep.engines.registry import resolve
from samestep.errors import LayoutError, UserError
from samestep.extras import is_installed
from samestep.job import Job
from samestep.layout import Layout, axis_in_words
from samestep.parallel.compile import check_compile
from samestep.parallel.pipeline import schedule
from samestep.recipe import AdamW, Average, NamedOptimizer, Optimizer, Recipe
from samestep.tasks.base import Task
from samestep.tasks.losses import TaskLoss, takes_gather, task_loss
from samestep.tasks.turns import Turn, check_optimizer_types, turns_of


def check_layout(engine: Engine, layout: Layout, precision: str, config: Path | None = None) -> None:
    """Raise UserError for a layout, precision or configuration that the engine, as installed, doesn't support."""
    able = engine.abilities
    if config is not None and able.config is None:
        raise UserError(
            f'run.engine_config is {config}, and engine "{engine.name}" has no configuration file of its own; '
            f"leave it out, or use engine {', '.join(name for name in ENGINES if resolve(name).abilities.config)}"
        )
    if config is not None and not config.is_file():
        raise UserError(f"run.engine_config is {config}, which is no file; use {able.config}")
    for module, command in able.packages.items():
        if not is_installed(module):
            raise UserError(f'engine "{engine.name}" needs {module}, which is not installed; {command}')
    for name in layout.split_axes():
        if name not in able.axes:
            raise LayoutError(
                f'layout "{layout}": engine "{engine.name}" does not split {name} yet; '
                f"it splits {', '.join(map(axis_in_words, sorted(able.axes))) or 'nothing; use layout single'}"
            )
    if layout.zero and layout.zero not in able.stages:
        _refuse_stage(layout, engine)
    for option in ("recompute", "offload", "attention"):
        for value in getattr(layout, option).split("+"):
            if value not in getattr(able, option):
                raise LayoutError(f'layout "{layout}": engine "{engine.name}" has no {option}={value} yet')
    schedule.check(layout)
    if layout.offloads_parameters and layout.zero < 2:
        offload = "parameters" if layout.offloads("parameters") else "parameters-disk"
        raise LayoutError(f'layout "{layout}": offload={offload} is for shards of parameters; use fsdp2 or zero2x2')
    if layout.sequence == "split" and layout.tensor == 1:
        raise LayoutError(
            f'layout "{layout}": sequence=split is for the ranks of tensor parallel; use tp2 sequence=split'
        )
    if layout.attention == "ring" and layout.context == 1:
        raise LayoutError(
            f'layout "{layout}": attention=ring is for the ranks of context parallel; use cp2 attention=ring'
        )
    if precision not in able.precisions:
        precisions = ", ".join(sorted(able.precisions))
        raise UserError(
            f'recipe.precision is {precision}, which engine "{engine.name}" does not have; use {precisions}'
        )
    engine.check(layout, precision, config)


_SHARDS = {1: "the optimizer state alone", 2: "gradients and optimizer state", 3: "the parameters"}
_AS_LAYOUT = {1: "zero1x{n}", 2: "zero2x{n}", 3: "fsdp{n}"}


def _refuse_stage(layout: Layout, engine: Engine) -> NoReturn:
    """Raise LayoutError for a stage of ZeRO that an engine doesn't have, with those that it has."""
    instead = " or ".join(_AS_LAYOUT[stage].format(n=layout.shard) for stage in sorted(engine.abilities.stages))
    raise LayoutError(
        f'layout "{layout}": engine "{engine.name}" has no shards of {_SHARDS[layout.zero]}; use {instead}'
    )


def check_job(job: Job, engine: Engine, layout: Layout, device: str) -> None:
    """Raise UserError for the first key that doesn't fit the engine, the layout or another key.

    `device`: the type of device that ranks compute on.
    """
    recipe, run = job.recipe, job.run
    check_communication(recipe.communication, engine, layout, recipe.precision)
    check_sparse_rows(run.sparse_rows, engine, layout, recipe.communication)
    check_average(recipe.average, engine)
    _check_shared_replicas(job, engine, layout)
    _check_master_weights(job, engine, layout)
    _check_attention_dropout(job, engine)
    _check_reduction(job, engine, layout, device)
    _check_loss_chunk(run.loss_chunk, engine, layout)
    check_buckets(run.bucket_mb, engine, layout, recipe.communication)
    _check_abilities(job, engine)
    if run.compile:
        check_compile(layout)
    if run.cut_at is not None and layout.pipeline == 1:
        raise UserError(f'run.cut_at names pipeline stages, and layout "{layout}" has none; use pp2, or no cut_at')


def check_task_needs(job: Job, engine: Engine, layout: Layout, task: Task) -> None:
    """Raise UserError for what a task's loss, turns or buffers need and the engine or the job doesn't have."""
    communication = job.recipe.communication
    if task.batch_buffers() and not engine.abilities.batch_buffers:
        raise UserError(f'engine "{engine.name}" keeps no batch_buffers() of a task; use engine native')
    _check_ordered_task(job, task)
    check_gather(task.loss, engine, communication)
    _check_several_losses(task_loss(task.loss, task.loss_weights), engine, communication)
    _check_turns(task, engine, layout, job)


def _check_abilities(job: Job, engine: Engine) -> None:
    """Check keys that an engine either supports or not, whatever the layout."""
    recipe, run, able, name = job.recipe, job.run, engine.abilities, engine.name
    if run.compile and not able.compiles:
        raise UserError(f'run.compile is true, and engine "{name}" compiles no blocks; use engine native')
    if run.float32_matmul != "highest" and not able.float32_matmul:
        raise UserError(
            f"run.float32_matmul is {run.float32_matmul}, which is of PyTorch's products, "
            f'and engine "{name}" has its own; use highest'
        )
    if run.profile is not None and not able.profiles:
        raise UserError(f'run.profile is given, and engine "{name}" does not support profiling; use engine native')
    if run.transport == "shared-memory" and not able.shared_memory:
        raise UserError(
            f'run.transport is shared-memory, and engine "{name}" does not send through it; '
            "use engine native, or transport auto"
        )
    if recipe.groups and not able.own_optimizers:
        raise UserError(
            f'recipe.groups is given, and engine "{name}" has one group of all parameters; use engine native'
        )
    if recipe.adapter is not None and not able.adapters:
        raise UserError(f'recipe.adapter is given, and engine "{name}" has no adapters; use engine native')
    if run.checkpoint is not None and not able.checkpoints:
        raise UserError(f'run.checkpoint is given, and engine "{name}" saves no checkpoints here; use engine native')


def check_average(average: Average | None, engine: Engine) -> None:
    """Raise UserError where an engine keeps no average of the weights."""
    if average is not None and not engine.abilities.averages:
        raise UserError(
            f'recipe.average is given, and engine "{engine.name}" keeps no average of the weights; use engine native'
        )


def _check_master_weights(job: Job, engine: Engine, layout: Layout) -> None:
    """Raise UserError where parameters in bf16 can't have a float32 copy with this engine, layout or job."""
    recipe, setting = job.recipe, "recipe.master_weights is true"
    if not recipe.master_weights:
        return
    if not engine.abilities.master_weights:
        raise UserError(f'{setting}, which engine "{engine.name}" does not have; use engine native')
    if layout.offload not in ("none", "activations"):
        raise LayoutError(
            f'layout "{layout}": {setting}, whose copies stay with the parameters; leave offload={layout.offload} out'
        )
    if recipe.communication is not None:
        raise UserError(
            f"{setting} and recipe.communication is {recipe.communication.kind}, which is for float32; use one"
        )
    if recipe.average is not None:
        raise UserError(f"{setting} and recipe.average is given, which would average rounded weights; use one")
    if job.run.share_replicas:
        raise UserError(f"{setting} and run.share_replicas is true, whose state lies in shared memory; use one")
    if job.run.reduction == "ordered":
        raise UserError(f"{setting} and run.reduction is ordered, which is for float32; use one")
    _check_copies_stepped({"recipe.optimizer": recipe.optimizer})
    for number, group in enumerate(recipe.groups):
        if group.optimizer is None or group.optimizer == recipe.optimizer:
            continue
        where = f"recipe.groups.{number}"
        _check_copies_stepped({f"{where}.optimizer": group.optimizer})
        raise UserError(
            f"{setting}, whose copies one optimizer steps, and {where}.optimizer is another one than "
            "recipe.optimizer; give the group lr, weight_decay or schedule in its place, or use master_weights: false"
        )


def _check_copies_stepped(optimizers: Mapping[str, Optimizer]) -> None:
    """Raise UserError for optimizers, by their places, that can't step the float32 copies of parameters in bf16."""
    subject = "recipe.master_weights is true"
    for where, spec in optimizers.items():
        if isinstance(spec, NamedOptimizer):
            raise UserError(
                f"{subject}, whose copies adamw or sgd steps, and {where} is {spec.name}; use one of them, or "
                "master_weights: false"
            )
        if isinstance(spec, AdamW) and spec.state != "full":
            raise UserError(f"{subject} and {where}.state is {spec.state}; keep the state full, or no master weights")
    if len({type(spec) for spec in optimizers.values()}) > 1:
        what = " and ".join(f"{where} is {spec.name}" for where, spec in optimizers.items())
        raise UserError(
            f"{subject}, whose copies one optimizer steps, and {what}; use one kind for all, or master_weights: false"
        )


def _check_attention_dropout(job: Job, engine: Engine) -> None:
    """Raise UserError where an engine can't leave the dropout of attention weights alone out."""
    if not job.recipe.attention_dropout and not engine.abilities.attention_dropout:
        raise UserError(
            f'recipe.attention_dropout is false, which engine "{engine.name}" does not have; use engine native, or '
            "recipe.dropout: false"
        )


def check_buckets(
    bucket_mb: float | None, engine: Engine, layout: Layout, communication: Communication | None
) -> None:
    """Raise UserError where there are no buckets of gradients whose size could be chosen."""
    if bucket_mb is None:
        return
    setting = f"run.bucket_mb is {bucket_mb:g}"
    if not engine.abilities.buckets:
        raise UserError(f'{setting}, and engine "{engine.name}" has no such buckets; use engine native')
    if communication is not None:  # some methods compress a bucket as a whole
        raise UserError(
            f"{setting}, and recipe.communication is {communication.kind}, whose result it may change; use one"
        )
    if layout.data_ranks == 1 or layout.zero >= 2:
        raise LayoutError(
            f'layout "{layout}": {setting}, and only replicas send gradients in such buckets; use dp2 or zero1x2, or '
            "no bucket_mb"
        )


def _check_loss_chunk(rows: int | None, engine: Engine, layout: Layout) -> None:
    """Raise UserError where the output layer and the loss can't be computed in chunks."""
    if rows is None:
        return
    if not engine.abilities.chunks_loss:
        raise UserError(f'run.loss_chunk is {rows}, which engine "{engine.name}" does not have; use engine native')
    if layout.context > 1 and layout.tensor > 1:
        raise LayoutError(
            f'layout "{layout}": run.loss_chunk is {rows}, and either the ranks of context parallel share the rows '
            "of logits or those of tensor parallel the words; use no loss_chunk, or a layout with one of them"
        )


def check_communication(communication: Communication | None, engine: Engine, layout: Layout, precision: str) -> None:
    """Raise UserError where what a recipe says of its messages can't be had with this engine, layout or precision."""
    if communication is None:
        return
    setting = f"recipe.communication is {communication.kind}"
    if not engine.abilities.sends_less:
        raise UserError(f'{setting}, which engine "{engine.name}" does not have; use engine native')
    if layout.size == 1 or layout.replicate != layout.size:
        instead = f"dp{layout.size}" if layout.size > 1 else "dp2"
        raise LayoutError(f'layout "{layout}": {setting}, which is for plain replicas; use {instead}')
    if layout.offload not in ("none", "activations"):
        raise LayoutError(
            f'layout "{layout}": {setting}, whose ranks step their whole optimizer; use dp{layout.size} without '
            f"offload={layout.offload}"
        )
    if precision == "fp16":
        raise UserError(f"{setting} and recipe.precision is fp16, whose scaled gradients it does not take; use bf16")


def check_gather(loss: Callable[..., Any], engine: Engine, communication: Communication | None) -> None:
    """Raise UserError for a loss that couples samples where replicas don't take one step together."""
    if not takes_gather(loss):
        return
    if not engine.abilities.gathers:
        raise UserError(
            f'engine "{engine.name}": the loss takes gather, for the rows of the whole batch, which this engine does '
            "not have; use engine native"
        )
    if communication is not None:
        raise UserError(
            f"the loss takes gather, for the rows of the whole batch, and recipe.communication is "
            f"{communication.kind}, whose replicas train on their own samples; use no recipe.communication"
        )


def _check_several_losses(loss: TaskLoss, engine: Engine, communication: Communication | None) -> None:
    """Raise UserError for a loss of several terms where each can't be divided by its own count."""
    if not loss.weights:
        return
    if not engine.abilities.several_losses:
        raise UserError(
            f'engine "{engine.name}": the loss has several terms (loss_weights), which this engine lacks; use '
            "engine native"
        )
    if communication is not None:
        raise UserError(
            f"the loss has several terms (loss_weights), and recipe.communication is {communication.kind}, which is "
            "for losses of one count; use no recipe.communication"
        )


def _check_turns(task: Task, engine: Engine, layout: Layout, job: Job) -> None:
    """Raise UserError for a task whose steps are taken in turns where they can't be."""
    turns = turns_of(task)
    if not turns:
        return
    check_optimizer_types(turns, job.recipe)
    if job.recipe.master_weights:
        _check_copies_stepped(_optimizers_of(turns, job.recipe))
    for turn in turns:
        check_gather(turn.loss, engine, job.recipe.communication)
        _check_several_losses(turn.task_loss(), engine, job.recipe.communication)
    if not engine.abilities.turns:
        raise UserError(f'engine "{engine.name}" takes no steps in turns; use engine native')
    if job.recipe.communication is not None:
        raise UserError(
            f"the task's steps are taken in turns, and recipe.communication is {job.recipe.communication.kind}, "
            "which is for one loss a step; use no recipe.communication"
        )
    if job.run.share_replicas:
        raise UserError(
            "the task's steps are taken in turns, and run.share_replicas is true, whose ranks step all parameters at "
            "once; use share_replicas: false"
        )
    if layout.pipeline > 1:
        raise LayoutError(
            f'layout "{layout}": the task\'s steps are taken in turns, each of another forward, and pipeline stages '
            f"are parts of one; use dp{layout.pipeline}, fsdp{layout.pipeline} or tp{layout.pipeline} in place of "
            f"pp{layout.pipeline}"
        )


def _optimizers_of(turns: Sequence[Turn], recipe: Recipe) -> dict[str, Optimizer]:
    """The optimizers of turns, by their places."""
    optimizers: dict[str, Optimizer] = {}
    for turn in turns:
        where = "recipe.optimizer" if turn.optimizer is None else f"turns(): turn {turn.name}: optimizer"
        optimizers[where] = turn.optimizer or recipe.optimizer
    return optimizers


def check_sparse_rows(choice: str, engine: Engine, layout: Layout, communication: Communication | None) -> None:
    """Raise UserError where rows of gradients are asked for that can't be had with this engine, layout or recipe."""
    if choice != "on" or layout.size == 1:
        return
    if not engine.abilities.sparse_rows:
        raise UserError(f'run.sparse_rows is on, which engine "{engine.name}" does not have; use engine native')
    if communication is not None:
        raise UserError(
            f"run.sparse_rows is on, and recipe.communication is {communication.kind}, which sends gradients its own "
            "way; use sparse_rows: auto"
        )
    if layout.zero or layout.pipeline > 1:
        instead = f"dp{layout.size}"
        raise LayoutError(
            f'layout "{layout}": run.sparse_rows is on, which is for replicas whose gradients are whole; use '
            f"{instead}, or sparse_rows: auto"
        )
    if layout.data_ranks == 1:
        raise LayoutError(
            f'layout "{layout}": run.sparse_rows is on, and there are no replicas that would exchange gradients; use '
            f"dp{layout.size}, or sparse_rows: auto"
        )


def _check_shared_replicas(job: Job, engine: Engine, layout: Layout) -> None:
    """Raise UserError where replicas can't share their parameters with this engine, layout or recipe."""
    if not job.run.share_replicas or layout.size == 1:
        return
    if not engine.abilities.shares_replicas:
        raise UserError(f'run.share_replicas is true, which engine "{engine.name}" does not have; use engine native')
    if layout.replicate != layout.size:
        raise LayoutError(
            f'layout "{layout}": run.share_replicas is true, which is for plain replicas; use dp{layout.size}'
        )
    if layout.offload not in ("none", "activations"):
        raise LayoutError(
            f'layout "{layout}": run.share_replicas is true, whose parameters and state stay in shared memory; use '
            f"dp{layout.size} without offload={layout.offload}"
        )
    if job.recipe.precision == "fp16":
        raise UserError(
            "run.share_replicas is true and recipe.precision is fp16, whose overflows one rank sees alone; use bf16"
        )
    if job.recipe.communication is not None:
        raise UserError(
            f"run.share_replicas is true, and recipe.communication is {job.recipe.communication.kind}, for which "
            "each rank keeps its own; use share_replicas: false"
        )
    if job.run.sparse_rows == "on":
        raise UserError(
            "run.share_replicas is true and run.sparse_rows is on, and ranks that share memory send no gradients; "
            "use sparse_rows: auto"
        )
    if job.recipe.average is not None:
        raise UserError(
            "recipe.average is given and run.share_replicas is true, whose ranks have one copy of the weights; use "
            "share_replicas: false"
        )
    if job.run.bucket_mb is not None:
        raise UserError(
            f"run.share_replicas is true and run.bucket_mb is {job.run.bucket_mb:g}, and ranks that share memory "
            "send no gradients; use one"
        )


# Of a layout: what adds in an order of its own, and what is not tried with virtual ranks.
_NOT_ORDERED = ("pipeline", "expert", "context", "tensor")

_ORDERED = "run.reduction is ordered"


def _check_reduction(job: Job, engine: Engine, layout: Layout, device: str) -> None:
    """Raise UserError where gradients can't be summed in one order with this engine, layout, device or job.

    `device`: the type of device that ranks compute on.
    """
    if job.run.reduction != "ordered":
        return
    recipe = job.recipe
    if not engine.abilities.ordered:
        raise UserError(f'{_ORDERED}, which engine "{engine.name}" does not have; use engine native')
    if any(getattr(layout, name) > 1 for name in _NOT_ORDERED) or layout.offload != "none":
        raise LayoutError(
            f'layout "{layout}": {_ORDERED}, which is for data ranks without offload; use dp{layout.size}, '
            f"zero1x{layout.size}, zero2x{layout.size} or fsdp{layout.size}, or reduction: fast"
        )
    if layout.data_ranks > recipe.virtual_ranks:
        raise LayoutError(
            f'layout "{layout}": {_ORDERED}, and recipe.virtual_ranks is {recipe.virtual_ranks}, fewer than the '
            f"{layout.data_ranks} ranks that share them out; use virtual_ranks: {layout.data_ranks} or more"
        )
    if device != "cpu":
        raise UserError(f"{_ORDERED}, and {device} adds in an order of its own; use device: cpu, or reduction: fast")
    if recipe.precision not in ("fp32", "fp64"):
        raise UserError(
            f"{_ORDERED}, and recipe.precision is {recipe.precision}, which shards round otherwise than replicas; "
            "use fp32 or fp64"
        )
    wrong = next((reason for reason in _unordered(job) if reason is not None), None)
    if wrong is not None:
        raise UserError(f"{_ORDERED}, and {wrong}, or reduction: fast")


def _unordered(job: Job) -> Iterator[str | None]:
    """What a job asks for that would change the order of a sum, and what to use."""
    recipe, run = job.recipe, job.run
    optimizers = [recipe.optimizer, *(group.optimizer for group in recipe.groups if group.optimizer is not None)]
    named = next((optimizer for optimizer in optimizers if isinstance(optimizer, NamedOptimizer)), None)
    if run.micro_batch is not None:
        yield f"run.micro_batch is {run.micro_batch}; a virtual rank is one forward: use recipe.virtual_ranks"
    if run.group_by_length:
        yield "run.group_by_length is true, which cuts the batch by the number of ranks; use group_by_length: false"
    if run.share_replicas:
        yield "run.share_replicas is true, whose ranks add in their own order; use share_replicas: false"
    if run.sparse_rows == "on":
        yield "run.sparse_rows is on, which adds rows in an order of its own; use sparse_rows: auto"
    if run.bucket_mb is not None:
        yield f"run.bucket_mb is {run.bucket_mb:g}, and its messages are no such buckets; use no bucket_mb"
    if run.compile:
        yield "run.compile is true, which compiles sums for each size of batch; use compile: false"
    if recipe.communication is not None:
        yield f"recipe.communication is {recipe.communication.kind}, which sends no exact sums; use none"
    if recipe.average is not None:
        yield "recipe.average is given, which is not tried with it; use no average"
    if named is not None:
        yield f"the optimizer is {named.name}, which may add over a parameter's numbers; use adamw or sgd"


def _check_ordered_task(job: Job, task: Task) -> None:
    """Raise UserError where gradients are summed in order, and a task's step is more than a sum over samples."""
    if job.run.reduction != "ordered":
        return
    if turns_of(task):
        raise UserError(f"{_ORDERED}, and the task's steps are taken in turns; use reduction: fast")
    if takes_gather(task.loss):
        raise UserError(f"{_ORDERED}, and the loss takes gather, for rows of other ranks; use reduction: fast")
    if task.loss_weights:
        raise UserError(f"{_ORDERED}, and the loss has several terms (loss_weights); use reduction: fast")
    if task.batch_buffers():
        raise UserError(f"{_ORDERED}, and the task has batch_buffers(), sums over the batch; use reduction: fast")
