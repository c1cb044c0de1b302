"""Translates the YAML of `accelerate config` to a job, and a job to a file for `accelerate launch --config_file`."""

from dataclasses import replace
from typing import Any

import yaml

from samestep.engines.accelerate_keys import (
    AXES,
    KINDS,
    compiler_of,
    fsdp_keys,
    is_fsdp2,
    precision_of,
    replicates,
    sharding_of,
    short_keys,
)
from samestep.errors import UserError
from samestep.job import Job
from samestep.layout import Layout
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
from samestep.translate.deepspeed import micro_batch_of
from samestep.translate.unsaid import unsaid

_STARTED = "who starts the ranks says it: torchrun ... -m samestep train JOB.yaml"

_REASONS = {
    "machine_rank": _STARTED,
    "main_process_ip": _STARTED,
    "main_process_port": _STARTED,
    "main_training_function": "a task is a class",
    "rdzv_backend": _STARTED,
    "same_network": _STARTED,
    "gpu_ids": "devices are those that the ranks see; hide others by the environment",
    "mpirun_config": _STARTED,
    "enable_cpu_affinity": "run.threads says how many threads a rank has; ranks are not bound to cores",
    "downcast_bf16": "for TPUs",
    "fp8_config": "recipe.precision can be fp64, fp32, bf16 or fp16",
    "debug": "a layout is proved by samestep verify",
    "num_cpu_threads_per_process": "run.threads says it",
}

_PREFETCH = "prefetching is set by itself"
_FSDP_REASONS = {
    "fsdp_version": "shards are those of FSDP2",
    "fsdp_state_dict_type": "model.safetensors is always whole",
    "fsdp_auto_wrap_policy": "blocks are found in the model",
    "fsdp_transformer_layer_cls_to_wrap": "blocks are found in the model",
    "fsdp_min_num_params": "blocks are found in the model",
    "fsdp_cpu_ram_efficient_loading": "each rank fills in its own shards",
    "fsdp_sync_module_states": "initial weights are the same on every rank",
    "fsdp_use_orig_params": "that of FSDP1; FSDP2 always keeps them",
    "fsdp_ignored_modules": "every parameter is sharded",
    "fsdp_sharding_strategy": "that of FSDP1; FSDP2 goes by fsdp_reshard_after_forward",
    "fsdp_backward_prefetch": _PREFETCH,
    "fsdp_backward_prefetch_policy": _PREFETCH,
    "fsdp_forward_prefetch": _PREFETCH,
}
_SHARDING = ("fsdp_sharding_strategy", "fsdp_reshard_after_forward")

_KINDS_OF_SAGEMAKER = ("DATA_PARALLEL", "MODEL_PARALLEL")


class ReadAccelerate(ConfigReader):
    """Translates an accelerate YAML to a job."""

    title = "an accelerate YAML"

    def recognises(self, content: Any) -> bool:
        return has_any(content, ("distributed_type", "compute_environment"))

    def read(self, content: Any, user_sizes: GivenSizes) -> Draft:
        draft = Draft()
        keys = SectionKeys(content, draft)
        kind = str(keys.take("distributed_type") or "NO")
        if kind not in (*KINDS, *_KINDS_OF_SAGEMAKER) and not replicates(kind):
            raise UserError(f"distributed_type is {kind}; use {', '.join(KINDS)} or MULTI_GPU")
        if keys.word("compute_environment", ("LOCAL_MACHINE", "AMAZON_SAGEMAKER")) == "AMAZON_SAGEMAKER":
            draft.remark("compute_environment", "AMAZON_SAGEMAKER", "a distribution dictionary can be translated")
        processes = keys.whole("num_processes", least=-1)  # -1: given at the start
        if processes is not None and processes > 0 and user_sizes.processes not in (None, processes):
            raise UserError(
                f"num_processes is {processes}, and --processes says {user_sizes.processes}; give one of them"
            )
        processes = user_sizes.processes or (processes if processes and processes > 0 else None)
        hosts = keys.whole("num_machines") or 1
        if processes and processes % hosts:
            raise UserError(f"num_processes is {processes}, which {hosts} machines (num_machines) don't share evenly")
        sizes = _SIZES.get(kind, _replicas)(keys, draft, hosts)
        if kind == "NO":
            processes = 1
        draft.set_layout(_filled(_parallelism(keys, draft, sizes), processes), _why(processes, hosts))
        _precision(keys, draft)
        if keys.switch("use_cpu") or kind == "MULTI_CPU":
            draft.set("run.device", "cpu")
        _compile(keys, draft)
        if user_sizes.batch:
            draft.set("recipe.batch", user_sizes.batch)
        else:
            draft.remark("recipe.batch", None, "not in the file: the script's batch of a rank x ranks x accumulation")
        for name in ("fsdp_config", "deepspeed_config", "megatron_lm_config"):
            keys.section(name).leave({}, f"distributed_type is {kind}, so it counts for nothing")
        keys.leave({**_REASONS, **{k: "for TPUs" for k in content if str(k).startswith("tpu")}}, "no counterpart")
        return draft


def _why(processes: int | None, hosts: int) -> str:
    if processes is None:
        return "the file doesn't say how many ranks; --processes of translate, train or torchrun does"
    return f"over {hosts} machines, of which each starts its ranks by torchrun" if hosts > 1 else ""


def _replicas(keys: SectionKeys, draft: Draft, hosts: int) -> Sizes:
    return Sizes()


def _read_fsdp(keys: SectionKeys, draft: Draft, hosts: int) -> Sizes:
    fsdp = fsdp_keys(keys.take("fsdp_config"))
    section = SectionKeys(fsdp, draft, "fsdp_config")
    names = ("fsdp_reshard_after_forward",) if is_fsdp2(fsdp) else _SHARDING
    settings = {name: section.take(name) for name in names}
    zero, hybrid = sharding_of({**fsdp, **settings})
    if hybrid and hosts == 1:
        hybrid = False
        strategy = next(value for value in settings.values() if value is not None)
        draft.remark("fsdp_config.fsdp_sharding_strategy", strategy, "one machine, over which all is sharded")
    offload = ["parameters"] if section.switch("fsdp_offload_params") else []
    options = {"recompute": "full"} if section.switch("fsdp_activation_checkpointing") else {}
    if section.switch("fsdp_activation_checkpointing_offload"):
        offload.append("activations")
    section.leave(_FSDP_REASONS, "no key that accelerate has")
    return Sizes(zero=zero, replicas=hosts if hybrid else 1, offload=offload, options=options)


def _read_deepspeed(keys: SectionKeys, draft: Draft, hosts: int) -> Sizes:
    section = keys.section("deepspeed_config")
    if (file := section.take("deepspeed_config_file")) is not None:
        raise UserError(
            f"deepspeed_config.deepspeed_config_file is {file}, which says the rest; "
            f"use samestep translate {file}, with --processes"
        )
    stage = section.whole("zero_stage", least=0)
    stage = 2 if stage is None else stage  # accelerate's default
    if stage > 3:
        raise UserError(f"deepspeed_config.zero_stage is {stage}; it can be 0, 1, 2 or 3")
    offload = []
    for key, path, on_cpu, on_disk in (
        ("offload_optimizer_device", "offload_optimizer_nvme_path", "optimizer", "optimizer-disk"),
        ("offload_param_device", "offload_param_nvme_path", "parameters", "parameters-disk"),
    ):
        device = section.word(key, ("none", "cpu", "nvme"))
        if device in ("cpu", "nvme"):
            offload.append(on_cpu if device == "cpu" else on_disk)
        taken = draft.get("run.offload_folder")
        if device == "nvme" and path in section and taken is None:
            draft.set("run.offload_folder", str(section.take(path)))
        section.remark(path, "one folder takes what is offloaded" if taken else "the device is not nvme")
    if clip := section.number("gradient_clipping"):
        draft.set("recipe.clip", clip)
    section.leave(
        {
            "gradient_accumulation_steps": "steps follow from recipe.batch and run.micro_batch",
            "zero3_init_flag": "each rank fills in its own shards",
            "zero3_save_16bit_model": "model.safetensors is always whole",
        },
        _STARTED,
    )
    return Sizes(zero=stage, offload=offload)


def _read_megatron(keys: SectionKeys, draft: Draft, hosts: int) -> Sizes:
    short = short_keys(keys.take("megatron_lm_config"), "megatron_lm_config", "megatron_lm_")
    section = SectionKeys(short, draft, "megatron_lm_config")
    tensor = section.whole("tp_degree") or 1
    options = {}
    if section.switch("sequence_parallelism") and tensor > 1:
        options["sequence"] = "split"
    if section.switch("recompute_activations"):
        options["recompute"] = "selective"
    if clip := section.number("gradient_clipping"):
        draft.set("recipe.clip", clip)
    section.remark("num_micro_batches", "recipe.batch / data ranks / run.micro_batch is how many there are")
    sizes = Sizes(
        pipeline=section.whole("pp_degree") or 1,
        tensor=tensor,
        context=section.whole("context_parallel_size") or 1,
        zero=1 if section.switch("use_distributed_optimizer") else 0,
        offload=["optimizer"] if section.switch("optimizer_cpu_offload") else [],
        options=options,
    )
    section.leave({}, "Megatron-LM's own")
    return sizes


# The function that reads the section of each `distributed_type`; all others replicate the model.
_SIZES = {"FSDP": _read_fsdp, "DEEPSPEED": _read_deepspeed, "MEGATRON_LM": _read_megatron}


def _parallelism(keys: SectionKeys, draft: Draft, sizes: Sizes) -> Sizes:
    """The mesh sizes with those of `parallelism_config`, if there is one."""
    short = short_keys(keys.take("parallelism_config"), "parallelism_config", "parallelism_config_")
    section = SectionKeys(short, draft, "parallelism_config")
    if not section:
        return sizes
    of_axes = {axis: section.whole(key) or 1 for key, axis in AXES.items()}
    shard, replicate = of_axes["shard"], of_axes["replicate"]
    context, heads = of_axes["context"], section.whole("sp_size") or 1
    if context > 1 and heads > 1:
        raise UserError(f"parallelism_config: cp_size is {context} and sp_size is {heads}; one of them must be 1")
    zero = sizes.zero if shard > 1 else 0
    section.leave({}, "tokens are exchanged for heads where these divide, or else keys and values are gathered")
    return replace(
        sizes,
        replicas=replicate if zero else 1,
        data=shard if zero else shard * replicate,
        zero=zero,
        context=max(context, heads),
        tensor=of_axes["tensor"],
    )


def _filled(sizes: Sizes, processes: int | None) -> Sizes:
    """Fill in the number of data ranks from the number of processes. Raises UserError if they don't divide."""
    if processes is None:
        return sizes
    taken = sizes.model * (sizes.replicas or 1) * (sizes.data or 1)
    if processes % taken or (sizes.data is not None and processes != taken):
        raise UserError(f"num_processes is {processes}, and the sizes make {taken}; use {taken}")
    return sizes if sizes.data is not None else replace(sizes, data=processes // taken)


def _precision(keys: SectionKeys, draft: Draft) -> None:
    setting = keys.take("mixed_precision")
    if setting is not None:
        keys.remark("fp16", "the key of older files; mixed_precision says it")
    precision = precision_of(setting, fp16=keys.switch("fp16"))
    if precision in ("bf16", "fp16"):
        draft.set("recipe.precision", precision)
    elif precision == "fp8":
        draft.set("recipe.precision", "bf16", "the source says fp8, which there is not")


def _compile(keys: SectionKeys, draft: Draft) -> None:
    short = short_keys(keys.take("dynamo_config"), "dynamo_config", "dynamo_")
    section = SectionKeys(short, draft, "dynamo_config")
    backend = compiler_of({"backend": section.take("backend")}, keys.take("dynamo_backend"))
    if backend is not None:
        draft.set("run.compile", True, "" if backend.upper() == "INDUCTOR" else f"by inductor, not {backend}")
    section.leave({}, "every block is compiled by itself, in torch.compile's default mode")


_SAID = {"recipe.precision", "run.layout", "run.device", "run.compile", "run.processes"}
_OFFLOADS_OF_ZERO = {"optimizer": "cpu", "optimizer-disk": "nvme"}


class WriteAccelerate(ConfigWriter):
    """Writes a job as an accelerate YAML."""

    def write(self, job: Job, layout: Layout) -> Written:
        remarks, expressed = list[str](), set(_SAID)
        config: dict[str, Any] = {
            "compute_environment": "LOCAL_MACHINE",
            "distributed_type": "NO",
            "num_processes": layout.size,
            "num_machines": 1,
            "use_cpu": job.run.device == "cpu",
            "mixed_precision": job.recipe.precision if job.recipe.precision in ("bf16", "fp16") else "no",
        }
        if job.recipe.precision == "fp64":
            remarks.append("recipe.precision = fp64: accelerate has none; the script would make a float64 model")
        config |= _kind(job, layout, remarks, expressed)
        if job.run.compile:
            config["dynamo_config"] = {"dynamo_backend": "INDUCTOR", "dynamo_use_regional_compilation": True}
        _options(layout, config["distributed_type"], remarks)
        remarks += unsaid(job, expressed)
        text = yaml.safe_dump(config, sort_keys=False, allow_unicode=True)
        comments = [f"# - {' '.join(remark.split())}" for remark in remarks]
        if comments:
            text += "\n".join(["# Without a key here:", *comments]) + "\n"
        return Written(text=text)


def _kind(job: Job, layout: Layout, remarks: list[str], expressed: set[str]) -> dict[str, Any]:
    """The `distributed_type` and its section: Megatron-LM for pipelines, DeepSpeed for ZeRO-1 and disks, or FSDP2."""
    if layout.size == 1:
        return {}
    if layout.pipeline > 1:
        return _written_megatron(job, layout, remarks, expressed)
    sharded = layout.zero == 1 or (
        layout.zero and any(layout.offloads(name) for name in ("optimizer", "optimizer-disk"))
    )
    if sharded and layout.tensor * layout.context == 1:
        return _written_deepspeed(job, layout, remarks, expressed)
    if sharded:
        remarks.append(
            f'run.layout "{layout}": ZeRO-1 and offloads of the optimizer are DeepSpeed\'s, without cp and tp'
        )
    if layout.zero >= 2 or layout.tensor * layout.context > 1:
        return _written_fsdp(layout, remarks)
    return {"distributed_type": "MULTI_CPU" if job.run.device == "cpu" else "MULTI_GPU"}


def _written_fsdp(layout: Layout, remarks: list[str]) -> dict[str, Any]:
    shards = {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": layout.zero != 2,
        "fsdp_offload_params": layout.offloads("parameters"),
        "fsdp_activation_checkpointing": layout.recompute != "none",
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    }
    config: dict[str, Any] = {"distributed_type": "FSDP", "fsdp_config": shards}
    if layout.replicate > 1 or layout.tensor * layout.context > 1:
        shard, replicate = layout.shard, layout.replicate
        if layout.zero < 2:  # accelerate combines tensor and context parallel only with shards
            shard, replicate = shard * replicate, 1
            remarks.append(
                f'run.layout "{layout}": with tp and cp accelerate shards the data ranks as fsdp{shard} does'
            )
        config["parallelism_config"] = {
            "parallelism_config_dp_replicate_size": replicate,
            "parallelism_config_dp_shard_size": shard,
            "parallelism_config_tp_size": layout.tensor,
            "parallelism_config_cp_size": layout.context,
        }
    return config


def _written_deepspeed(job: Job, layout: Layout, remarks: list[str], expressed: set[str]) -> dict[str, Any]:
    micro = micro_batch_of(job, layout)
    expressed |= {"recipe.clip", "run.offload_folder"}
    zero: dict[str, Any] = {
        "zero_stage": layout.zero,
        "gradient_accumulation_steps": job.recipe.batch // (micro * layout.data_ranks),
        "gradient_clipping": job.recipe.clip or 0.0,
        "zero3_init_flag": layout.zero == 3,
    }
    if layout.replicate > 1:
        remarks.append(f"run.layout dp{layout.replicate}: DeepSpeed shards over all {layout.data_ranks} data ranks")
    for name, device in _OFFLOADS_OF_ZERO.items():
        if layout.offloads(name):  # type: ignore[arg-type]
            zero["offload_optimizer_device"] = device
            if device == "nvme":
                zero["offload_optimizer_nvme_path"] = str(job.run.offload_folder or "/local_nvme")
    return {"distributed_type": "DEEPSPEED", "deepspeed_config": zero}


def _written_megatron(job: Job, layout: Layout, remarks: list[str], expressed: set[str]) -> dict[str, Any]:
    expressed |= {"recipe.clip", "run.micro_batch"}
    samples = -(-job.recipe.batch // layout.data_ranks)
    remarks.append(
        f"run.layout pp{layout.pipeline}: Megatron-LM has models of its own (BERT, GPT, T5), and no others"
    )
    if layout.zero > 1:
        remarks.append(f"run.layout zero {layout.zero}: Megatron-LM shards the optimizer's state alone")
    return {
        "distributed_type": "MEGATRON_LM",
        "megatron_lm_config": {
            "megatron_lm_tp_degree": layout.tensor,
            "megatron_lm_pp_degree": layout.pipeline,
            "megatron_lm_num_micro_batches": -(-samples // micro_batch_of(job, layout)),
            "megatron_lm_sequence_parallelism": layout.sequence == "split",
            "megatron_lm_recompute_activations": layout.recompute != "none",
            "megatron_lm_use_distributed_optimizer": layout.zero > 0,
            "megatron_lm_gradient_clipping": job.recipe.clip or 0.0,
        },
    }


def _options(layout: Layout, kind: str, remarks: list[str]) -> None:
    """Add a remark for each option of the layout for which this `distributed_type` has no key."""
    expressed = {
        "FSDP": {"recompute=full", "offload=parameters", "attention=ring"},
        "DEEPSPEED": {"offload=optimizer", "offload=optimizer-disk"},
        "MEGATRON_LM": {"recompute=selective", "sequence=split", "schedule=1f1b"},
    }.get(kind, set())
    plain = Layout()
    for option in ("schedule", "recompute", "sequence", "attention", "balance", "order"):
        if (value := getattr(layout, option)) != getattr(plain, option) and f"{option}={value}" not in expressed:
            remarks.append(f"run.layout {option}={value}: no key of {kind} says it")
    for value in layout.offload.split("+"):
        if value != "none" and f"offload={value}" not in expressed:
            remarks.append(f"run.layout offload={value}: no key of {kind} says it")
    if layout.stages_a_rank > 1 and layout.pipeline > 1:
        remarks.append(f"run.layout stages={layout.stages_a_rank}: no key of {kind} says it")
