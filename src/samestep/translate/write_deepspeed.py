"""From a job to DeepSpeed's JSON (https://www.deepspeed.ai/docs/config-json)."""

import json
from typing import Any

from samestep.errors import UserError
from samestep.job import Job
from samestep.layout import Layout
from samestep.recipe import AdamW, NamedOptimizer, Recipe
from samestep.translate.base import Writer, Written
from samestep.translate.unsaid import unsaid

_SAID = {
    "recipe.batch",
    "recipe.optimizer",
    "recipe.schedule",
    "recipe.clip",
    "recipe.precision",
    "run.layout",
    "run.micro_batch",
    "run.tensorboard",
}


class WriteDeepSpeed(Writer):
    def write(self, job: Job, layout: Layout) -> Written:
        recipe, remarks = job.recipe, list[str]()
        said = set(_SAID)
        config = _batch(job, layout)
        config |= _optimizer(recipe, remarks)
        config |= _schedule(recipe, remarks, said)
        config["gradient_clipping"] = recipe.clip or 0.0  # left out, DeepSpeed would clip to 1.0
        config |= _precision(recipe, remarks)
        config |= _layout(job, layout, remarks, said)
        config["tensorboard"] = {"enabled": job.run.tensorboard}
        remarks += unsaid(job, said)
        return Written(text=json.dumps(config, indent=2) + "\n", remarks=remarks)


def micro_batch_of(job: Job, layout: Layout) -> int:
    """The largest micro-batch that a rank's samples are a multiple of, and no larger than the job's.

    Raises UserError where data ranks don't share the batch evenly, as most tools want it.
    """
    batch, ranks = job.recipe.batch, layout.data_ranks
    samples, rest = divmod(batch, ranks)
    if rest or not samples:
        near = [ranks * n for n in (samples, samples + 1) if n]
        raise UserError(
            f'recipe.batch is {batch}, which the {ranks} data ranks of layout "{layout}" don\'t share evenly; '
            "DeepSpeed wants train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x data "
            f"ranks, so {' or '.join(map(str, near))} would do"
        )
    wanted = job.run.micro_batch or samples
    if job.run.micro_batch is None and layout.pipeline > 1:
        wanted = max(1, samples // (2 * layout.pipeline))  # as many micro-batches as samestep's pipelines take
    return max(size for size in range(1, min(wanted, samples) + 1) if samples % size == 0)


def _batch(job: Job, layout: Layout) -> dict[str, Any]:
    micro = micro_batch_of(job, layout)
    return {
        "train_batch_size": job.recipe.batch,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": job.recipe.batch // (micro * layout.data_ranks),
    }


def _optimizer(recipe: Recipe, remarks: list[str]) -> dict[str, Any]:
    given = recipe.optimizer
    if isinstance(given, NamedOptimizer):
        remarks.append(f"recipe.optimizer = {given.name}: make it in the script, and hand it to deepspeed.initialize")
        return {}
    if isinstance(given, AdamW):
        settings = {"lr": given.lr, "betas": list(given.betas), "eps": given.eps, "weight_decay": given.weight_decay}
        made = {"type": "AdamW", "params": settings}
    else:
        settings = {"lr": given.lr, "momentum": given.momentum, "weight_decay": given.weight_decay}
        made = {"type": "SGD", "params": {**settings, "nesterov": given.nesterov}}
    if given.weight_decay and not given.decay_all:
        remarks.append(
            "recipe.optimizer.decay_all = false: DeepSpeed decays what it is handed; hand it two groups of "
            "parameters, the vectors (biases, norms) with weight_decay 0"
        )
    return {"optimizer": made}


def _schedule(recipe: Recipe, remarks: list[str], said: set[str]) -> dict[str, Any]:
    """DeepSpeed counts warm-up and decay in steps, so it must be known how many there are."""
    given, steps = recipe.schedule, recipe.steps
    if not given.warmup and given.decay == "none":
        return {}
    if steps is None and (given.decay != "none" or given.warmup < 1):
        remarks.append(
            f"recipe.schedule = {given.decay}, warm-up {given.warmup:g}: DeepSpeed wants a number of steps; "
            "a job with recipe.steps has one"
        )
        return {}
    warmup = int(given.warmup if given.warmup >= 1 else given.warmup * (steps or 0))
    settings: dict[str, Any] = {"warmup_num_steps": max(1, warmup), "warmup_type": "linear"}
    remarks.append(
        "recipe.schedule: DeepSpeed warms up over 2 steps at least, and its first step has the lowest rate"
    )
    if given.decay == "cosine":
        name, settings["cos_min_ratio"] = "WarmupCosineLR", given.final
    else:
        name = "WarmupDecayLR" if given.decay == "linear" else "WarmupLR"
        settings["warmup_max_lr"] = recipe.optimizer.lr
        if given.decay == "linear" and given.final:
            remarks.append(f"recipe.schedule.final = {given.final:g}: WarmupDecayLR goes down to 0")
    if given.decay != "none":
        settings["total_num_steps"] = steps
        said.add("recipe.steps")
    return {"scheduler": {"type": name, "params": settings}}


def _precision(recipe: Recipe, remarks: list[str]) -> dict[str, Any]:
    """Autocast over float32 parameters, which is what samestep's bf16 and fp16 are."""
    names = {"bf16": "bfloat16", "fp16": "float16"}
    if recipe.precision in names:
        return {"torch_autocast": {"enabled": True, "dtype": names[recipe.precision]}}
    if recipe.precision == "fp64":
        remarks.append("recipe.precision = fp64: DeepSpeed trains in float32 or less")
    return {}


def _layout(job: Job, layout: Layout, remarks: list[str], said: set[str]) -> dict[str, Any]:
    config: dict[str, Any] = {}
    zero: dict[str, Any] = {"stage": layout.zero}
    if layout.zero and layout.replicate > 1:
        remarks.append(
            f"run.layout dp{layout.replicate}: DeepSpeed shards over all {layout.data_ranks} data ranks, and has no "
            "replicas of the shards"
        )
    zero |= _offload(job, layout, remarks, said)
    config["zero_optimization"] = zero
    if layout.tensor > 1:
        config["tensor_parallel"] = {"autotp_size": layout.tensor}
    if layout.context > 1:
        config["sequence_parallel_size"] = layout.context
    if layout.pipeline > 1:
        config["pipeline"] = {"stages": layout.pipeline}
        remarks.append(
            f"run.layout pp{layout.pipeline}: the script must make its model a PipelineModule of that many stages"
        )
    if layout.recompute != "none" or layout.offloads("activations"):
        config["activation_checkpointing"] = {"cpu_checkpointing": layout.offloads("activations")}
        remarks.append("run.layout recompute: the script's model must call deepspeed.checkpointing.checkpoint")
    for option, plain in (
        ("schedule", "1f1b"),
        ("sequence", "whole"),
        ("balance", "speed"),
        ("order", Layout().order),
    ):
        if (value := getattr(layout, option)) != plain:
            remarks.append(f"run.layout {option}={value}: DeepSpeed has no choice of it")
    if layout.stages_a_rank > 1:
        remarks.append(f"run.layout stages={layout.stages_a_rank}: DeepSpeed has one stage a rank")
    if layout.recompute == "selective":
        remarks.append("run.layout recompute=selective: DeepSpeed recomputes what the script wraps")
    return config


def _offload(job: Job, layout: Layout, remarks: list[str], said: set[str]) -> dict[str, Any]:
    """Where ZeRO puts what is offloaded. It can do so only with what it shards."""
    wanted = set(layout.offload.split("+")) - {"none", "activations"}
    if not wanted:
        return {}
    if layout.zero == 0:
        remarks.append(f"run.layout offload={layout.offload}: DeepSpeed offloads what ZeRO shards; zero1xN would do")
        return {}
    place: dict[str, str] = {"device": "cpu"}
    if {"optimizer-disk", "parameters-disk"} & wanted:
        said.add("run.offload_folder")
        folder = str(job.run.offload_folder) if job.run.offload_folder else "/local_nvme"
        if job.run.offload_folder is None:
            remarks.append("run.offload_folder = null: DeepSpeed wants a folder; write yours for /local_nvme")
        place = {"device": "nvme", "nvme_path": folder}
    if not layout.offloads_parameters:
        return {"offload_optimizer": place}
    if layout.zero < 3:
        remarks.append(f"run.layout offload={layout.offload}: DeepSpeed offloads parameters with ZeRO-3 alone")
        return {"offload_optimizer": place}
    return {"offload_optimizer": place, "offload_param": place}
