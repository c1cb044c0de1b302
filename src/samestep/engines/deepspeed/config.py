"""Read a ds_config.json, check it against the job, and complete it for `deepspeed.initialize`.

Also: which settings each layout allows, and the conversion of the configured optimizer to a recipe's.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from math import prod
from pathlib import Path
from typing import Any

from samestep.engines.config_file import json_section
from samestep.engines.deepspeed.keys import (
    DEFAULT_LR,
    NEUTRAL,
    OPTIMIZERS,
    SIZES,
    adds_decay_to_gradient,
    bf16_key,
    clip_of,
    default_decay,
    has_auto,
    offload_of,
    precision_of,
    schema_of,
    solved,
    stage_of,
    value_of,
    zero_of,
)
from samestep.errors import LayoutError, UserError
from samestep.layout import Layout
from samestep.recipe import SGD, AdamW, NamedOptimizer, Recipe
from samestep.validation import checked

Config = dict[str, Any]

_ADAM = ("Adam", "AdamW")


@dataclass(frozen=True, kw_only=True)
class JobValues:
    """The values of a job that a ds_config.json can also set; None: not set by the job."""

    ranks: int
    stage: int | None = None
    batch: int | None = None  # over all ranks
    micro_batch: int | None = None
    clip: float | None = None
    precision: str | None = None
    offload_optimizer: str | None = None  # cpu or nvme
    offload_parameters: str | None = None


def read(path: Path) -> Config:
    """The configuration as it stands in the file. Raises UserError where it is not a JSON object."""
    config = json_section(path)
    for name in ("zero_optimization", "optimizer", "scheduler", "fp16", "bf16", "bfloat16"):
        older = name == "zero_optimization" and isinstance(config.get(name), bool)
        if name in config and not older and not isinstance(config[name], dict):
            raise UserError(f"{path}: {name} is {config[name]!r}; DeepSpeed wants an object there")
    return config


def takes_optimizer(config: Mapping[str, Any]) -> bool:
    """Whether DeepSpeed makes the optimizer; samestep makes it if the section is missing or has an "auto"."""
    return "optimizer" in config and not has_auto(config["optimizer"])


def takes_schedule(config: Mapping[str, Any]) -> bool:
    return "scheduler" in config and not has_auto(config["scheduler"])


def sizes(config: Mapping[str, Any], job_values: JobValues) -> tuple[int | None, int | None]:
    """The batch and the micro-batch that a configuration and a job agree on.

    Raises UserError where train_batch_size is not micro-batch x accumulation x ranks, or not the job's batch.
    """
    total, micro, steps = (_size(config, name) for name in SIZES)
    total, micro, steps, _ = solved(total, micro, steps, job_values.ranks, _contradiction)
    if total is not None and job_values.batch is not None and total != job_values.batch:
        raise UserError(
            f"recipe.batch is {job_values.batch} and the DeepSpeed configuration makes batches of {total}; use "
            f'recipe.batch: {total}, or "auto" for train_batch_size'
        )
    if steps is not None and micro is None and job_values.batch is not None:
        micro = -(-job_values.batch // (steps * job_values.ranks))
    return total or job_values.batch, micro


def _contradiction(total: int, micro: int | None, steps: int | None, ranks: int | None) -> UserError:
    factors = {"train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": steps, "ranks": ranks}
    product = " x ".join(f"{size} ({name})" for name, size in factors.items() if size is not None)
    by = prod(size for size in factors.values() if size is not None)
    if micro is not None and steps is not None:
        return UserError(
            f"the DeepSpeed configuration has train_batch_size {total}, which is not {product} = {by}; use two of "
            'the three and "auto" for the other'
        )
    return UserError(
        f"the DeepSpeed configuration has train_batch_size {total}, which {product} does not divide; use "
        f"{total // by * by or by} or {total // by * by + by}"
    )


def _size(config: Mapping[str, Any], name: str) -> int | None:
    """A batch size of the configuration; None for "auto" or none."""
    value = value_of(config, name)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise UserError(f"the DeepSpeed configuration has {name} {value!r}; it must be a whole number of 1 or more")
    return value


def agree(config: Mapping[str, Any], job_values: JobValues) -> None:
    """Raise one UserError that lists all settings whose values in the configuration and the job differ."""
    _, micro = sizes(config, job_values)
    both = {
        "run.layout (ZeRO stage)": (job_values.stage, stage_of(config)),
        "run.micro_batch": (job_values.micro_batch, micro),
        "recipe.clip": (job_values.clip, clip_of(config)),
        "recipe.precision": (job_values.precision, precision_of(config)),
        "run.layout (offload of the optimizer)": (
            job_values.offload_optimizer,
            offload_of(config, "offload_optimizer"),
        ),
        "run.layout (offload of parameters)": (job_values.offload_parameters, offload_of(config, "offload_param")),
    }
    wrong = {name: pair for name, pair in both.items() if None not in pair and pair[0] != pair[1]}
    if wrong:
        contradictions = "; ".join(f"{name}: {own} here and {theirs} there" for name, (own, theirs) in wrong.items())
        raise UserError(
            f"the job and its DeepSpeed configuration contradict each other ({contradictions}); leave each out on "
            'one side, or write "auto" in the configuration'
        )


def completed(from_file: Mapping[str, Any], job_values: JobValues, *, on_cpu: bool) -> Config:
    """Complete a configuration for `deepspeed.initialize`: settings that it leaves open are taken from the job."""
    agree(from_file, job_values)
    batch, micro = sizes(from_file, job_values)
    micro = micro or job_values.micro_batch
    config = _without_auto(from_file)
    stage = stage_of(from_file)
    zero = {**zero_of(config), "stage": (job_values.stage or 0) if stage is None else stage}
    for name, device in (
        ("offload_optimizer", job_values.offload_optimizer),
        ("offload_param", job_values.offload_parameters),
    ):
        if device is not None:
            zero[name] = {**zero.get(name, {}), "device": device}
    config["zero_optimization"] = zero
    # DeepSpeed requires batch = micro-batch x accumulation x ranks. Batches here may have any size, and the trainer
    # itself marks the end of a step, so the sizes are rounded up to the next ones that satisfy this.
    share = -(-(batch or job_values.ranks) // job_values.ranks)
    steps = -(-share // (micro or share))
    micro_batch = micro if batch is None and micro else -(-share // steps)
    config |= dict(zip(SIZES, (micro_batch * steps * job_values.ranks, micro_batch, steps), strict=True))
    if clip_of(from_file) is None:
        # Left out, it would be 1.0 in DeepSpeed 0.19, and no clipping in versions before mid 2026.
        config["gradient_clipping"] = job_values.clip or 0.0
    if precision_of(from_file) is None and job_values.precision in ("bf16", "fp16"):
        section = config.get(bf16_key(config) if job_values.precision == "bf16" else "fp16", {})
        config[job_values.precision] = {**section, "enabled": True}
    for name, takes in (("optimizer", takes_optimizer), ("scheduler", takes_schedule)):
        if not takes(from_file):
            config.pop(name, None)
    if on_cpu and config.get("optimizer", {}).get("type") in _ADAM:
        # PyTorch's Adam computes the same and needs no compilation. DeepSpeed's default weight decay is 0.
        params = config["optimizer"].get("params", {})
        instead = {} if params.get("torch_adam") else {"weight_decay": 0.0}
        config["optimizer"]["params"] = {"torch_adam": True, **instead, **params}
    # Without these, DeepSpeed refuses PyTorch's optimizers under ZeRO.
    return {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False, **config}


def _without_auto(value: Any) -> Any:
    """A copy without "auto" values, for which DeepSpeed's defaults then apply."""
    if isinstance(value, Mapping):
        return {name: _without_auto(inner) for name, inner in value.items() if inner != "auto"}
    return deepcopy(value)


# Parameters that recipes don't have, and that change no number.
_HARMLESS = {"torch_adam", "fused", "foreach", "fp32_optimizer_states"}


def optimizer_of(config: Config, recipe: Recipe) -> AdamW | SGD:
    """The recipe's optimizer, or the configuration's where the recipe has the default one.

    A kind that recipes don't have is DeepSpeed's own business. Raises UserError where both say different ones.
    """
    section, own = config.get("optimizer"), recipe.optimizer
    if isinstance(own, NamedOptimizer):
        raise UserError(
            f'recipe.optimizer is {own.name}, and engine "deepspeed" takes adamw or sgd; use one, or engine native'
        )
    if section is None:
        return own
    theirs = None if _foreign(section) else _mirrored(section, recipe)
    if theirs is None and has_auto(section):
        raise UserError(
            f'the DeepSpeed configuration has optimizer {section}, whose "auto" samestep fills for an optimizer that '
            f"recipes have alone, and {_foreign(section)} is none; use a value for each"
        )
    if recipe.optimizer != AdamW() and recipe.optimizer != theirs:
        raise UserError(
            f"recipe.optimizer is {recipe.optimizer} and the DeepSpeed configuration has optimizer {section}; "
            "leave one of them out"
        )
    return theirs or own


def check_proof(config: Config) -> None:
    """Raise UserError for an optimizer without an equivalent in recipes, which a proof needs as its reference."""
    section = config.get("optimizer")
    if section is not None and (what := _foreign(section)):
        raise UserError(
            f"the DeepSpeed configuration has {what}, which recipes don't have, so there is no reference to hold it "
            "against; use AdamW, Adam with adam_w_mode, or SGD, and samestep train takes it as it is"
        )


def _foreign(section: Config) -> str | None:
    """The first part of an optimizer's configuration that recipes don't support; None if they support all of it."""
    kind, params = str(section.get("type", "")), section.get("params", {})
    schema = schema_of(section)
    if schema is None:
        return f"optimizer {kind}"
    if adds_decay_to_gradient(section) and params.get("weight_decay", 0) != 0:
        return f"{kind} with adam_w_mode false and weight_decay {params['weight_decay']}"
    names = {field.name for field in fields(schema)} | {"adam_w_mode"} | _HARMLESS
    for name, value in params.items():
        if name not in names and not (name in NEUTRAL and value == NEUTRAL[name]):
            return f"{kind} with {name} {value}"
    return None


def _mirrored(section: Config, recipe: Recipe) -> AdamW | SGD:
    """Convert the configured optimizer to a recipe's, with DeepSpeed's defaults for missing values."""
    schema = OPTIMIZERS[str(section["type"]).lower()]
    own = recipe.optimizer if isinstance(recipe.optimizer, schema) else schema()
    params = section.get("params", {})
    names = {field.name for field in fields(schema)}
    values = {
        name: getattr(own, name) if value == "auto" else value for name, value in params.items() if name in names
    }
    defaults = {"lr": DEFAULT_LR, "weight_decay": default_decay(section)}
    decay_all = own.decay_all if has_auto(section) else True  # DeepSpeed makes one group of all
    return checked(schema, {**defaults, **values, "decay_all": decay_all})


def check_layout(layout: Layout, stage: int | None) -> None:
    """Refuse what DeepSpeed's ZeRO stages don't have."""
    stage = layout.zero if stage is None else stage
    if layout.pipeline > 1 and stage > 1:
        ranks = layout.data_ranks
        fix = f"pp{layout.pipeline} zero1x{ranks}" if ranks > 1 else f"pp{layout.pipeline} zero1x2"
        raise LayoutError(
            f'layout "{layout}": DeepSpeed\'s pipeline goes with ZeRO 1 alone, which shards no gradients; use "{fix}"'
        )
    if layout.replicate > 1 and layout.shard > 1:
        raise LayoutError(
            f'layout "{layout}": DeepSpeed shards over all ranks; use '
            f'"{replace(layout, replicate=1, shard=layout.data_ranks)}"'
        )
    if layout.offloads("optimizer-disk") and stage != 3:
        raise LayoutError(
            f'layout "{layout}": DeepSpeed offloads to disk at ZeRO 3 alone; use fsdp2 offload=optimizer-disk'
        )
    if layout.offloads("optimizer") and stage == 0:
        raise LayoutError(
            f'layout "{layout}": DeepSpeed offloads the optimizer from ZeRO 1 on; use zero1x2 offload=optimizer'
        )
    if layout.offloads("parameters") and stage != 3:
        raise LayoutError(
            f'layout "{layout}": DeepSpeed offloads parameters at ZeRO 3 alone; use fsdp2 offload=parameters'
        )


def check_pipeline(layout: Layout, precision: str) -> None:
    """Refuse what DeepSpeed's pipeline doesn't have."""
    if layout.schedule != "1f1b" or layout.stages > 1:
        raise LayoutError(
            f'layout "{layout}": DeepSpeed\'s pipeline has one schedule, 1f1b, of one stage a rank; use '
            f'"{replace(layout, schedule="1f1b", stages=1)}", or engine native'
        )
    if layout.balance != "speed":
        raise LayoutError(
            f'layout "{layout}": DeepSpeed\'s pipeline cuts by the number of parameters alone; use '
            f'"{replace(layout, balance="speed")}", or engine native'
        )
    if layout.offload != "none":
        raise LayoutError(
            f'layout "{layout}": engine deepspeed has no offload in a pipeline; use '
            f'"{replace(layout, offload="none")}"'
        )
    if precision != "fp32":
        raise UserError(
            f'layout "{layout}": recipe.precision is {precision}, in which DeepSpeed\'s pipeline has an optimizer '
            "with gradients that can't be weighed by a count that is known after backward; use fp32"
        )


def check_pipeline_asked(config: Config, cut_at: Sequence[str]) -> None:
    """Refuse what a job or a configuration can say of pipelines and can't have here."""
    if cut_at:
        raise UserError(
            "run.cut_at names pipeline stages, and engine deepspeed cuts by the number of parameters; use no cut_at"
            ", or engine native"
        )
    section = config.get("pipeline")
    if isinstance(section, dict) and section.get("activation_checkpoint_interval"):
        raise UserError(
            "the DeepSpeed configuration has pipeline.activation_checkpoint_interval "
            f"{section['activation_checkpoint_interval']}: DeepSpeed would compute layers again with other dropout; "
            "use 0, or engine native, with recompute=full"
        )
