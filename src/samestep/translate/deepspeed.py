"""Translates DeepSpeed's JSON (https://www.deepspeed.ai/docs/config-json) to a job, and back.

`deepspeed_optimizer` translates the sections of the optimizer and the schedule.
"""

import json
from typing import Any

from samestep.engines.deepspeed.keys import OFFLOADS, SIZES, bf16_key, precision_of, solved, stage_of, zero_of
from samestep.errors import UserError
from samestep.job import Job, Log
from samestep.layout import Layout
from samestep.limits import MOST, divisors
from samestep.recipe import Recipe
from samestep.translate.base import (
    ConfigReader,
    ConfigWriter,
    Draft,
    GivenSizes,
    SectionKeys,
    Sizes,
    Written,
    has_any,
)
from samestep.translate.deepspeed_optimizer import read_optimizer, written_optimizer, written_schedule
from samestep.translate.unsaid import unsaid

# A file with one of these keys is recognised as DeepSpeed's.
_ITS_KEYS = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "zero_optimization",
    "zero_allow_untested_optimizer",
    "fp16",
    "bf16",
    "bfloat16",
    "torch_autocast",
    "optimizer",
    "scheduler",
    "steps_per_print",
)

_REASONS = {
    "steps_per_print": "every step stands in metrics.jsonl",
    "wall_clock_breakdown": "metrics.jsonl has the seconds of each step and of its data",
    "memory_breakdown": "report.json has the peak of every rank, and train --dry-run what it holds",
    "dataloader_drop_last": "no sample is dropped, and none repeated",
    "communication_data_type": "float32, for the same step in every layout; recipe.communication has bf16 and fp16",
    "prescale_gradients": "losses are summed and divided by the global count",
    "gradient_predivide_factor": "losses are summed and divided by the global count",
    "gradient_allreduce_op": "losses are summed and divided by the global count",
    "flops_profiler": "report.json has the floating-point operations a second of language models",
    "comms_logger": "report.json and train --dry-run have the bytes that each rank sent",
    "csv_monitor": "metrics.jsonl has the same numbers",
    "comet": "run.log has other services",
    "autotuning": "samestep tune JOB.yaml tries settings that take the same step",
    "zero_allow_untested_optimizer": "any optimizer is sharded",
    "zero_force_ds_cpu_optimizer": "offload=optimizer steps with PyTorch's own optimizer",
    "aio": "offload=optimizer-disk maps a file into memory, and has nothing to set",
    "data_types": "gradients are summed in the parameters' precision, float32",
    "elasticity": "the global batch is the same for any number of ranks",
    "checkpoint": "belongs to DeepSpeed's own checkpoints",
    "compile": "DeepCompile's own passes; run.compile: true compiles every block",
}
_OTHERWISE = "no counterpart"

_FEWER_BITS = "shards are sent in full; for replicas (dpN) recipe.communication has methods that send fewer bits"
_ZERO_REASONS = {
    "zero_hpz_partition_size": "keeps a second copy of the shards in each group; dpM fsdpN shards in groups alone",
    "zero_quantized_weights": _FEWER_BITS,
    "zero_quantized_gradients": _FEWER_BITS,
    "zero_quantized_nontrainable_weights": _FEWER_BITS,
    "stage3_gather_16bit_weights_on_model_save": "model.safetensors is always whole",
    "gather_16bit_weights_on_model_save": "model.safetensors is always whole",
    "ignore_unused_parameters": "unused parameters are found out by themselves",
    "sub_group_size": "parameters are stepped as they are",
}
_ZERO_OTHERWISE = "buckets, prefetching and overlap are set by themselves"


class ReadDeepSpeed(ConfigReader):
    """Translates a DeepSpeed JSON to a job."""

    title = "a DeepSpeed JSON"

    def recognises(self, content: Any) -> bool:
        return has_any(content, _ITS_KEYS)

    def read(self, content: Any, user_sizes: GivenSizes) -> Draft:
        draft = Draft()
        keys = SectionKeys(content, draft)
        sizes = _sizes(keys, draft)
        data = read_batch(keys, draft, sizes, user_sizes)
        draft.set_layout(
            Sizes(**{**vars(sizes), "data": data}),
            "" if data else "the file doesn't say how many ranks; --processes of translate, train or torchrun does",
        )
        read_optimizer(keys, draft)
        _clip(keys, draft)
        _read_precision(keys, draft)
        _loggers(keys, draft)
        keys.leave(_REASONS, _OTHERWISE)
        return draft


def _sizes(keys: SectionKeys, draft: Draft) -> Sizes:
    """Read the mesh sizes, except the number of data ranks."""
    tensor_keys = keys.section("tensor_parallel")
    tensor = tensor_keys.whole("autotp_size", least=0) or 1
    for name in ("tp", "tensor_parallel"):
        inner = tensor_keys.section(name)
        tensor = inner.whole("tp_size") or tensor
        inner.leave({}, "what is sliced is found from the model")
    tensor_keys.leave({}, "what is sliced is found from the model; run.tensor_plan says otherwise")

    pipe = keys.section("pipeline")
    stages = pipe.whole("stages") or 1
    every = pipe.whole("activation_checkpoint_interval", least=0) or 0
    options = {"recompute": "full"} if every else {}
    if every > 1:
        draft.remark(pipe.place("activation_checkpoint_interval"), every, "every block is recomputed by itself")
    pipe.leave({"partition": "stages are cut by cost; run.cut_at says otherwise"}, "a pipeline's own concern here")

    zero, offload = _zero(keys, draft)
    checkpointing = keys.section("activation_checkpointing")
    if checkpointing:
        options["recompute"] = "full"
        if checkpointing.switch("cpu_checkpointing"):
            offload.append("activations")
        checkpointing.leave(
            {"partition_activations": "tp with sequence=split keeps a part of the tokens a rank"},
            "every block is recomputed",
        )
    return Sizes(
        pipeline=stages,
        zero=zero,
        context=keys.whole("sequence_parallel_size") or 1,
        tensor=tensor,
        offload=offload,
        options=options,
    )


def _zero(keys: SectionKeys, draft: Draft) -> tuple[int, list[str]]:
    """Read the ZeRO stage and the offloads."""
    section = SectionKeys(zero_of({"zero_optimization": keys.take("zero_optimization")}), draft, "zero_optimization")
    stage = stage_of({"zero_optimization": {"stage": section.whole("stage", least=0)}}) or 0
    offload = []
    for (key, switch), what in zip(OFFLOADS.items(), ("optimizer", "parameters"), strict=True):
        if section.switch(switch):  # next to the section that replaced it
            offload.append(what)
        inner = section.section(key)
        device = inner.word("device", ("none", "cpu", "nvme"))
        if device in ("cpu", "nvme"):
            offload.append(what if device == "cpu" else f"{what}-disk")
        folder = inner.take("nvme_path")
        if folder is not None and device == "nvme" and draft.get("run.offload_folder") in (None, str(folder)):
            draft.set("run.offload_folder", str(folder))
        elif folder is not None:
            other = "the device is not nvme" if device != "nvme" else "one folder takes what is offloaded"
            draft.remark(inner.place("nvme_path"), folder, other)
        inner.leave({}, "buffers are set by themselves")
    section.leave(_ZERO_REASONS, _ZERO_OTHERWISE)
    return stage, offload


def read_batch(keys: SectionKeys, draft: Draft, sizes: Sizes, user_sizes: GivenSizes) -> int | None:
    """Set batch and micro-batch size; returns the number of data ranks, or None if it is not known.

    DeepSpeed requires train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x data ranks.
    Raises UserError for numbers that contradict this.
    """
    batch, micro, accumulation = (keys.whole(name) for name in SIZES)
    if user_sizes.batch is not None and batch not in (None, user_sizes.batch):
        raise UserError(f"train_batch_size is {batch}, and --batch says {user_sizes.batch}; give one of them")
    batch = batch or user_sizes.batch
    # Where two of the three are left out, DeepSpeed accumulates nothing.
    steps = accumulation or (None if batch and micro else 1)
    batch, micro, _, data = solved(batch, micro, steps, _data_ranks(sizes, user_sizes), _contradiction)
    if batch:
        draft.set("recipe.batch", batch, "of all ranks")
    else:
        why = (
            "the global batch is micro-batch x accumulation x data ranks; translate's --processes or --batch says it"
        )
        draft.remark("train_batch_size", None, why)
    if micro:
        draft.set("run.micro_batch", micro)
    if accumulation and not (batch and micro):
        draft.remark(
            "gradient_accumulation_steps", accumulation, "steps follow from recipe.batch and run.micro_batch"
        )
    return data


def _data_ranks(sizes: Sizes, user_sizes: GivenSizes) -> int | None:
    if user_sizes.processes is None:
        return None
    if user_sizes.processes % sizes.model:
        raise UserError(
            f"--processes is {user_sizes.processes}, and the model is split over {sizes.model}; use a multiple"
        )
    return user_sizes.processes // sizes.model


def _contradiction(batch: int, micro: int | None, accumulation: int | None, data: int | None) -> UserError:
    parts = [
        f"train_micro_batch_size_per_gpu {micro}" if micro else "",
        f"gradient_accumulation_steps {accumulation}" if accumulation else "",
        f"{data} data rank{'s' if data != 1 else ''}" if data else "",
    ]
    product = (micro or 1) * (accumulation or 1) * (data or 1)
    near = [product * n for n in sorted({max(1, batch // product), batch // product + 1})]
    fitting = [size for size in ([product] if data and micro and accumulation else near) if size <= MOST]
    fix = f"use a batch of {' or '.join(map(str, fitting))}" if fitting else "make their product smaller"
    return UserError(
        f"train_batch_size is {batch}, and {' x '.join(filter(None, parts))} = {product} "
        f"{'is not that' if data and micro and accumulation else 'does not divide it'}; train_batch_size = "
        f"train_micro_batch_size_per_gpu x gradient_accumulation_steps x data ranks, so {fix}"
    )


def _clip(keys: SectionKeys, draft: Draft) -> None:
    is_set = "gradient_clipping" in keys
    clip = keys.number("gradient_clipping")
    if clip:
        draft.set("recipe.clip", clip)
    elif not is_set:
        draft.remark(
            "gradient_clipping",
            None,
            "not given, which is 1.0 for DeepSpeed from mid 2026, and none before; recipe.clip",
        )


def _read_precision(keys: SectionKeys, draft: Draft) -> None:
    """Set the precision: torch_autocast is samestep's autocast over float32 parameters; fp16 and bf16 come close."""
    fp16 = keys.enabled("fp16")
    bf16 = keys.enabled(bf16_key(keys))
    autocast = keys.enabled("torch_autocast")
    precision = precision_of({"fp16": {"enabled": bool(fp16)}, "bf16": {"enabled": bool(bf16)}})
    why = "DeepSpeed's parameters are in {} with float32 copies; here they are float32, and matrix products in {}"
    if precision in ("fp16", "bf16"):
        draft.set("recipe.precision", precision, why.format(precision, precision))
    if autocast:
        dtype = autocast.word("dtype", ("bfloat16", "float16", "torch.bfloat16", "torch.float16"))
        draft.set("recipe.precision", "fp16" if dtype in ("float16", "torch.float16") else "bf16")
    fp16.leave({}, "the loss is scaled as torch.amp.GradScaler does by default")
    bf16.leave({}, "sums and the optimizer's state are float32")
    autocast.leave({}, "PyTorch's own list of operations is taken")


def _loggers(keys: SectionKeys, draft: Draft) -> None:
    """Read the sections of the services that get the numbers of each step."""
    if "tensorboard" not in keys and "wandb" not in keys:
        return
    log = list[Any]()
    board, wandb = keys.section("tensorboard"), keys.section("wandb")
    if board.switch("enabled"):
        log.append("tensorboard")
    board.leave({}, "events go into the run's folder; run.folder says which")
    if wandb.switch("enabled"):
        project, team, group = (wandb.text(name) for name in ("project", "team", "group"))
        given = {"entity": team, "group": group}
        args = {name: value for name, value in given.items() if value is not None}
        settings = {"project": project} if project is not None else {}
        log.append({"kind": "wandb", **settings, **({"args": args} if args else {})} if settings or args else "wandb")
    wandb.leave({}, "no counterpart")
    draft.set("run.log", log)


def _written_loggers(job: Job, remarks: list[str]) -> dict[str, Any]:
    """Write the services that DeepSpeed has too. None, where TensorBoard is a default, is written as TensorBoard."""
    log = (Log(kind="tensorboard"),) if job.run.log is None else job.run.log
    sections: dict[str, Any] = {"tensorboard": {"enabled": any(entry.kind == "tensorboard" for entry in log)}}
    for entry in log:
        if entry.kind == "wandb":
            renamed = {"team": entry.args.get("entity"), "group": entry.args.get("group"), "project": entry.project}
            sections["wandb"] = {"enabled": True, **{name: value for name, value in renamed.items() if value}}
        elif entry.kind != "tensorboard":
            remarks.append(f"run.log = {entry.kind}: DeepSpeed writes to TensorBoard and wandb")
    return sections


_SAID = {
    "recipe.batch",
    "recipe.optimizer",
    "recipe.schedule",
    "recipe.clip",
    "recipe.precision",
    "run.layout",
    "run.micro_batch",
    "run.log",
}


class WriteDeepSpeed(ConfigWriter):
    """Writes a job as a DeepSpeed JSON."""

    def write(self, job: Job, layout: Layout) -> Written:
        recipe, remarks = job.recipe, list[str]()
        expressed = set(_SAID)
        config = _batch(job, layout)
        config |= written_optimizer(recipe, remarks)
        config |= written_schedule(recipe, remarks, expressed)
        config["gradient_clipping"] = recipe.clip or 0.0  # without the key, DeepSpeed would clip to 1.0
        config |= _written_precision(recipe, remarks)
        config |= _layout(job, layout, remarks, expressed)
        config |= _written_loggers(job, remarks)
        remarks += unsaid(job, expressed)
        return Written(text=json.dumps(config, indent=2) + "\n", remarks=remarks)


def micro_batch_of(job: Job, layout: Layout) -> int:
    """The largest micro-batch size that divides a rank's samples and is not larger than the job's.

    Raises UserError if the data ranks don't divide the batch, which most tools require.
    """
    batch, ranks = job.recipe.batch, layout.data_ranks
    samples, rest = divmod(batch, ranks)
    if rest or not samples:
        near = [ranks * n for n in (samples, samples + 1) if n]
        raise UserError(
            f'recipe.batch is {batch}, which the {ranks} data ranks of layout "{layout}" don\'t share evenly; '
            "DeepSpeed wants train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x data "
            f"ranks, so use {' or '.join(map(str, near))}"
        )
    micro_batch = job.run.micro_batch or samples
    if job.run.micro_batch is None and layout.pipeline > 1:
        micro_batch = max(
            1, samples // (2 * layout.pipeline)
        )  # as many micro-batches as samestep's default for pipelines
    return max(size for size in divisors(samples) if size <= micro_batch)


def _batch(job: Job, layout: Layout) -> dict[str, Any]:
    micro = micro_batch_of(job, layout)
    return {
        "train_batch_size": job.recipe.batch,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": job.recipe.batch // (micro * layout.data_ranks),
    }


def _written_precision(recipe: Recipe, remarks: list[str]) -> dict[str, Any]:
    """The section of the precision: samestep's bf16 and fp16 are autocast over float32 parameters."""
    names = {"bf16": "bfloat16", "fp16": "float16"}
    if recipe.precision in names:
        return {"torch_autocast": {"enabled": True, "dtype": names[recipe.precision]}}
    if recipe.precision == "fp64":
        remarks.append("recipe.precision = fp64: DeepSpeed trains in float32 or less")
    return {}


def _layout(job: Job, layout: Layout, remarks: list[str], expressed: set[str]) -> dict[str, Any]:
    config: dict[str, Any] = {}
    zero: dict[str, Any] = {"stage": layout.zero}
    if layout.zero and layout.replicate > 1:
        remarks.append(
            f"run.layout dp{layout.replicate}: DeepSpeed shards over all {layout.data_ranks} data ranks, and has no "
            "replicas of the shards"
        )
    zero |= _offload(job, layout, remarks, expressed)
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
        ("attention", "ulysses"),
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


def _offload(job: Job, layout: Layout, remarks: list[str], expressed: set[str]) -> dict[str, Any]:
    """ZeRO's sections of offloads; ZeRO can only offload what it shards, and the rest gets a remark."""
    offloads = set(layout.offload.split("+")) - {"none", "activations"}
    if not offloads:
        return {}
    if layout.zero == 0:
        remarks.append(f"run.layout offload={layout.offload}: DeepSpeed offloads what ZeRO shards; use zero1xN")
        return {}
    place: dict[str, str] = {"device": "cpu"}
    if {"optimizer-disk", "parameters-disk"} & offloads:
        expressed.add("run.offload_folder")
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
