"""The engine: which layouts and configurations DeepSpeed takes, and the start of its own engine."""

from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from samestep.display.page import Words
from samestep.engines.base import Abilities, Engine, Preparation
from samestep.engines.deepspeed import config as configuration
from samestep.engines.deepspeed import keys, nvme, pipeline
from samestep.engines.deepspeed.config import (
    JobValues,
    check_layout,
    check_pipeline,
    check_pipeline_asked,
    check_proof,
    optimizer_of,
)
from samestep.engines.deepspeed.gradients import SameOrder
from samestep.engines.deepspeed.initialize import deepspeed, initialize, linear_kept, quietly
from samestep.engines.deepspeed.pipeline import PipelineTrainer
from samestep.engines.deepspeed.trainer import DeepSpeedTrainer, trained, undo_first_step
from samestep.errors import UserError
from samestep.job import Job
from samestep.launch.device import device_of
from samestep.layout import Layout
from samestep.parallel.exact.batch_norm import global_batch_norm
from samestep.parallel.exact.buffers import keep_no_cache
from samestep.parallel.exact.dropout import same_dropout
from samestep.parallel.exact.forward_context import ForwardContext
from samestep.recipe import Recipe, Schedule
from samestep.tasks.base import Task


class DeepSpeed(Engine):
    """`deepspeed.initialize` takes the step: ZeRO 0 to 3, its pipeline, offload, and the user's ds_config.json."""

    name = "deepspeed"
    abilities: ClassVar[Abilities] = Abilities(
        about=Words("DeepSpeed, with your `ds_config.json`", "DeepSpeed，可带你的 `ds_config.json`"),
        axes=frozenset({"pipeline", "replicate", "shard"}),
        precisions=frozenset({"fp32", "bf16", "fp16"}),
        offload=frozenset({"none", "optimizer", "optimizer-disk", "parameters"}),
        config="a ds_config.json",
        packages={"deepspeed": "pip install 'samestep[deepspeed]'"},
    )

    def check(self, layout: Layout, precision: str, config: Path | None) -> None:
        """Raise LayoutError for a pipeline that DeepSpeed's can't be."""
        if layout.pipeline > 1:
            check_pipeline(layout, precision)

    def check_task(self, task: Task, layout: Layout, config: Path | None) -> None:
        """Raise UserError for a task whose model DeepSpeed's pipeline can't run."""
        if layout.pipeline > 1:
            pipeline.check_pipeline_task(task, layout)

    def in_this_process(self) -> AbstractContextManager[None]:
        return linear_kept()

    def settle(self, job: Job, layout: Layout) -> tuple[Job, Layout]:
        """Take settings from the configuration where the job has its defaults; those that both set must agree."""
        config = configuration.read(job.run.engine_config) if job.run.engine_config is not None else {}
        recipe = job.recipe
        stage = keys.stage_of(config)
        check_layout(layout, stage)
        check_pipeline_asked(config, job.run.cut_at or ())
        configuration.agree(config, _asked(layout, recipe=recipe, micro_batch=job.run.micro_batch))
        _, micro = configuration.sizes(config, JobValues(ranks=layout.data_ranks, batch=recipe.batch))
        recipe = replace(
            recipe,
            clip=recipe.clip or keys.clip_of(config),
            precision=keys.precision_of(config) or recipe.precision,
            optimizer=optimizer_of(config, recipe),
        )
        if configuration.takes_schedule(config) and recipe.schedule != Schedule():
            raise UserError(
                "the DeepSpeed configuration has a scheduler and the recipe a schedule; leave one of them out"
            )
        if stage and layout.replicate > 1:
            layout = replace(layout, replicate=1, shard=layout.replicate, zero=stage)
        nvme.check(config)
        run = replace(job.run, micro_batch=job.run.micro_batch or micro, layout=str(layout))
        return replace(job, recipe=recipe, run=run), layout

    def make_ready(self, job: Job, layout: Layout) -> None:
        """Build the extension for disks before ranks start: they would all build it at once."""
        config = configuration.read(job.run.engine_config) if job.run.engine_config is not None else {}
        if nvme.to_disk(config) or layout.offloads("optimizer-disk"):
            nvme.build(device_of(0, job.run.device).type)

    def check_proof(self, job: Job) -> None:
        """Raise UserError if the configuration has an optimizer that a proof has no reference for."""
        if job.run.engine_config is not None:
            check_proof(configuration.read(job.run.engine_config))

    def prepare(self, model: nn.Module, how: Preparation) -> DeepSpeedTrainer:
        """Complete the configuration, cut a pipeline if there is one, and start DeepSpeed's engine.

        Order: dropout and batch norm are replaced in the model first, the order of units is watched next
        (`SameOrder`), and `deepspeed.initialize` comes last, as it replaces parameters by its own.
        """
        options = how.options
        from_file = configuration.read(options.engine_config) if options.engine_config is not None else {}
        check_layout(how.layout, keys.stage_of(from_file))
        check_pipeline_asked(from_file, options.cut_at or ())
        job_values = replace(
            _asked(how.layout),
            batch=options.batch,
            micro_batch=options.micro_batch,
            clip=options.clip,
            # In a job the precision is settled: a proof asks for fp32 whatever the job has.
            precision=None if options.precision == "fp32" and options.batch is None else options.precision,
        )
        config = configuration.completed(from_file, job_values, on_cpu=how.device.type == "cpu")
        keep_no_cache(model)
        forward_context = ForwardContext()
        same_dropout(model, forward_context)
        global_batch_norm(model, how.mesh.data_group, forward_context)
        package = deepspeed(how.device)
        _check_precision(config, package, how.device)
        if nvme.to_disk(config):
            nvme.load(how.device)
        config, place = nvme.placed(config, how.options.offload_folder)
        stages = None
        if how.layout.pipeline > 1:
            stages = pipeline.cut(model, package=package, layout=how.layout, mesh=how.mesh, device=how.device)
        order = None
        if config["zero_optimization"]["stage"] == 3 and how.layout.data_ranks > 1:
            order = SameOrder(model, how.mesh.data_group, how.device)
        module, held = (model, model) if stages is None else (stages.module, stages)
        optimizer = None if configuration.takes_optimizer(from_file) else how.optimizer_of(held.named_parameters())
        schedule = (
            None if optimizer is None or configuration.takes_schedule(from_file) else how.schedule_of(optimizer)
        )
        if optimizer is None and not configuration.takes_schedule(from_file):
            schedule = how.schedule_of  # DeepSpeed calls it with the optimizer that it makes
        engine = initialize(
            package,
            how.device,
            model=module,
            optimizer=optimizer,
            model_parameters=trained(module) if optimizer is None else None,
            lr_scheduler=schedule,
            config=config,
        )
        if engine.zero_optimization() and not hasattr(engine.optimizer, "override_loss_scale"):
            raise UserError(
                f"DeepSpeed makes a {type(engine.optimizer).__name__} of this configuration, whose gradients can't "
                "be weighed by a count that is known after backward; use no data_types, or stage 2"
            )
        undo_first_step(engine)
        common: dict[str, Any] = {
            "engine": engine,
            "package": package,
            "model": model,
            "forward_context": forward_context,
        }
        common |= {"layout": how.layout, "mesh": how.mesh, "device": how.device, "place": place}
        return DeepSpeedTrainer(order=order, **common) if stages is None else PipelineTrainer(stages=stages, **common)


def _asked(layout: Layout, recipe: Recipe | None = None, micro_batch: int | None = None) -> JobValues:
    """The job's values; None for those at their default."""
    in_memory = "cpu" if layout.offloads("optimizer") else None
    return JobValues(
        ranks=layout.data_ranks,
        stage=layout.zero or None,
        batch=None if recipe is None else recipe.batch,
        micro_batch=micro_batch,
        clip=None if recipe is None else recipe.clip,
        precision=None if recipe is None or recipe.precision == "fp32" else recipe.precision,
        offload_optimizer="nvme" if layout.offloads("optimizer-disk") else in_memory,
        offload_parameters="cpu" if layout.offloads("parameters") else None,
    )


def _check_precision(config: dict[str, Any], package: Any, device: torch.device) -> None:
    """Raise UserError for fp16 where DeepSpeed's accelerator has none."""
    with quietly(device):
        accelerator = package.accelerator.get_accelerator()
    if keys.precision_of(config) == "fp16" and not accelerator.is_fp16_supported():
        raise UserError(f"DeepSpeed has no fp16 on {device.type}; use bf16 or fp32")
