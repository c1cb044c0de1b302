"""The engine: which layouts and configurations DeepSpeed takes, and the start of its own engine."""

from dataclasses import fields, replace
from typing import Any, ClassVar

import torch
from torch import nn

from samestep.comm.mesh import Mesh
from samestep.engines.base import Abilities, Engine, OptimizerOf, ScheduleOf
from samestep.engines.deepspeed import config as configuration
from samestep.engines.deepspeed.config import Asked
from samestep.engines.deepspeed.start import deepspeed, initialize, quietly
from samestep.engines.deepspeed.trainer import DeepSpeedTrainer, trained
from samestep.errors import LayoutError, UserError
from samestep.job import Job
from samestep.layout import Layout
from samestep.parallel.batch_norm import global_batch_norm
from samestep.parallel.cache import keep_no_cache
from samestep.parallel.dropout import same_dropout
from samestep.parallel.moment import Now
from samestep.parallel.spread import Details
from samestep.recipe import SGD, AdamW, Recipe, Schedule
from samestep.validation import checked

_PYTORCH_LR = 1e-3  # of an optimizer whose configuration names none


class DeepSpeed(Engine):
    """`deepspeed.initialize` takes the step: ZeRO 0 to 3, offload, bf16, fp16, and the user's ds_config.json."""

    name = "deepspeed"
    abilities: ClassVar[Abilities] = Abilities(
        dimensions=frozenset({"replicate", "shard"}),
        precisions=frozenset({"fp32", "bf16", "fp16"}),
        offload=frozenset({"none", "optimizer", "parameters"}),
        config="a ds_config.json",
        packages={"deepspeed": "pip install 'samestep[deepspeed]'"},
        scales_shards=True,
    )

    def settle(self, job: Job, layout: Layout) -> tuple[Job, Layout]:
        """What its configuration says goes where the job has its default; what both say must be the same."""
        given = configuration.read(job.run.engine_config) if job.run.engine_config is not None else {}
        recipe = job.recipe
        stage = configuration.stage_of(given)
        _check_layout(layout, stage)
        configuration.agree(given, _asked(layout, recipe=recipe, micro_batch=job.run.micro_batch))
        _, micro = configuration.sizes(given, Asked(ranks=layout.size, batch=recipe.batch))
        recipe = replace(
            recipe,
            clip=recipe.clip or configuration.clip_of(given),
            precision=configuration.precision_of(given) or recipe.precision,
            optimizer=_optimizer(given, recipe),
        )
        if configuration.takes_schedule(given) and recipe.schedule != Schedule():
            raise UserError(
                "the DeepSpeed configuration has a scheduler and the recipe a schedule; leave one of them out"
            )
        if stage and layout.replicate > 1:
            layout = replace(layout, replicate=1, shard=layout.replicate, zero=stage)
        run = replace(job.run, micro_batch=job.run.micro_batch or micro, layout=str(layout))
        return replace(job, recipe=recipe, run=run), layout

    def prepare(
        self,
        model: nn.Module,
        *,
        layout: Layout,
        mesh: Mesh,
        device: torch.device,
        precision: str,
        clip: float | None,
        optimizer_of: OptimizerOf,
        schedule_of: ScheduleOf,
        details: Details,
    ) -> DeepSpeedTrainer:
        given = configuration.read(details.engine_config) if details.engine_config is not None else {}
        _check_layout(layout, configuration.stage_of(given))
        asked = replace(
            _asked(layout),
            batch=details.batch,
            micro_batch=details.micro_batch,
            clip=clip,
            # In a job the precision is settled: a proof asks for fp32 whatever the job has.
            precision=None if precision == "fp32" and details.batch is None else precision,
        )
        config = configuration.completed(given, asked, on_cpu=device.type == "cpu")
        keep_no_cache(model)
        now = Now()
        same_dropout(model, now)
        global_batch_norm(model, mesh.data_group, now)
        package = deepspeed(device)
        _check_precision(config, package, device)
        optimizer = None if configuration.takes_optimizer(given) else optimizer_of(model.named_parameters())
        schedule = None if optimizer is None or configuration.takes_schedule(given) else schedule_of(optimizer)
        if optimizer is None and not configuration.takes_schedule(given):
            schedule = schedule_of  # DeepSpeed calls it with the optimizer that it makes
        engine = initialize(
            package,
            device,
            model=model,
            optimizer=optimizer,
            model_parameters=trained(model) if optimizer is None else None,
            lr_scheduler=schedule,
            config=config,
        )
        if engine.zero_optimization() and not hasattr(engine.optimizer, "override_loss_scale"):
            raise UserError(
                f"DeepSpeed makes a {type(engine.optimizer).__name__} of this configuration, whose gradients can't "
                "be weighed by a count that is known after backward; no data_types, or stage 2, would do"
            )
        return DeepSpeedTrainer(
            engine=engine, package=package, model=model, layout=layout, mesh=mesh, device=device, now=now
        )


def _asked(layout: Layout, recipe: Recipe | None = None, micro_batch: int | None = None) -> Asked:
    """What the job asks for where it is not left at its default."""
    return Asked(
        ranks=layout.size,
        stage=layout.zero or None,
        batch=None if recipe is None else recipe.batch,
        micro_batch=micro_batch,
        clip=None if recipe is None else recipe.clip,
        precision=None if recipe is None or recipe.precision == "fp32" else recipe.precision,
        offload_optimizer="cpu" if layout.offloads("optimizer") else None,
        offload_parameters="cpu" if layout.offloads("parameters") else None,
    )


def _check_layout(layout: Layout, stage: int | None) -> None:
    """Refuse what DeepSpeed's stages don't have."""
    stage = layout.zero if stage is None else stage
    if layout.replicate > 1 and layout.shard > 1:
        raise LayoutError(
            f'layout "{layout}": DeepSpeed shards over all ranks; '
            f'"{replace(layout, replicate=1, shard=layout.data_ranks)}" would do'
        )
    if layout.offloads("optimizer") and stage == 0:
        raise LayoutError(
            f'layout "{layout}": DeepSpeed offloads the optimizer from ZeRO 1 on; zero1x2 offload=optimizer would do'
        )
    if layout.offloads("parameters") and stage != 3:
        raise LayoutError(
            f'layout "{layout}": DeepSpeed offloads parameters at ZeRO 3 alone; fsdp2 offload=parameters would do'
        )


def _check_precision(config: dict[str, Any], package: Any, device: torch.device) -> None:
    with quietly(device):
        accelerator = package.accelerator.get_accelerator()
    if configuration.precision_of(config) == "fp16" and not accelerator.is_fp16_supported():
        raise UserError(f"DeepSpeed has no fp16 on {device.type}; bf16 or fp32 would do")


def _optimizer(given: configuration.Config, recipe: Recipe) -> AdamW | SGD:
    """The recipe's optimizer, or the configuration's where the recipe has the default one.

    A kind that recipes don't have is DeepSpeed's own business.
    """
    section = given.get("optimizer")
    if section is None:
        return recipe.optimizer
    kind = str(section.get("type", "")).lower()
    schema = {"adam": AdamW, "adamw": AdamW, "sgd": SGD}.get(kind)
    theirs: AdamW | SGD | None = None
    if schema is not None:
        known = {field.name for field in fields(schema)}
        mine = recipe.optimizer if isinstance(recipe.optimizer, schema) else schema()
        values = {
            name: value for name, value in section.get("params", {}).items() if name in known and value != "auto"
        }
        decay_all = mine.decay_all if configuration.has_auto(section) else True  # DeepSpeed makes one group of all
        open_lr = section.get("params", {}).get("lr") == "auto"
        theirs = checked(schema, {"lr": mine.lr if open_lr else _PYTORCH_LR, **values, "decay_all": decay_all})
    if recipe.optimizer != AdamW() and recipe.optimizer != theirs:
        raise UserError(
            f"recipe.optimizer is {recipe.optimizer} and the DeepSpeed configuration has optimizer {section}; "
            "leave one of them out"
        )
    return theirs or recipe.optimizer
