"""From a job to the YAML that `accelerate launch --config_file` takes."""

from typing import Any

import yaml

from samestep.job import Job
from samestep.layout import Layout
from samestep.translate.base import Writer, Written
from samestep.translate.unsaid import unsaid
from samestep.translate.write_deepspeed import micro_batch_of

_SAID = {"recipe.precision", "run.layout", "run.device", "run.compile", "run.processes"}
_OFFLOADS_OF_ZERO = {"optimizer": "cpu", "optimizer-disk": "nvme"}


class WriteAccelerate(Writer):
    def write(self, job: Job, layout: Layout) -> Written:
        remarks, said = list[str](), set(_SAID)
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
        config |= _kind(job, layout, remarks, said)
        if job.run.compile:
            config["dynamo_config"] = {"dynamo_backend": "INDUCTOR", "dynamo_use_regional_compilation": True}
        _options(layout, config["distributed_type"], remarks)
        remarks += unsaid(job, said)
        text = yaml.safe_dump(config, sort_keys=False, allow_unicode=True)
        comments = [f"# - {' '.join(remark.split())}" for remark in remarks]
        if comments:
            text += "\n".join(["# Without a key here:", *comments]) + "\n"
        return Written(text=text)


def _kind(job: Job, layout: Layout, remarks: list[str], said: set[str]) -> dict[str, Any]:
    """How accelerate trains: pipelines are Megatron-LM's, ZeRO-1 and disks are DeepSpeed's, other shards FSDP2's."""
    if layout.size == 1:
        return {}
    if layout.pipeline > 1:
        return _megatron(job, layout, remarks, said)
    sharded = layout.zero == 1 or (
        layout.zero and any(layout.offloads(name) for name in ("optimizer", "optimizer-disk"))
    )
    if sharded and layout.tensor * layout.context == 1:
        return _deepspeed(job, layout, remarks, said)
    if sharded:
        remarks.append(
            f'run.layout "{layout}": ZeRO-1 and offloads of the optimizer are DeepSpeed\'s, without cp and tp'
        )
    if layout.zero >= 2 or layout.tensor * layout.context > 1:
        return _fsdp(layout, remarks)
    return {"distributed_type": "MULTI_CPU" if job.run.device == "cpu" else "MULTI_GPU"}


def _fsdp(layout: Layout, remarks: list[str]) -> dict[str, Any]:
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
        if layout.zero < 2:  # accelerate composes replicas with nothing but shards
            shard, replicate = shard * replicate, 1
            remarks.append(
                f'run.layout "{layout}": beside tp and cp accelerate shards the data ranks as fsdp{shard} does'
            )
        config["parallelism_config"] = {
            "parallelism_config_dp_replicate_size": replicate,
            "parallelism_config_dp_shard_size": shard,
            "parallelism_config_tp_size": layout.tensor,
            "parallelism_config_cp_size": layout.context,
        }
    return config


def _deepspeed(job: Job, layout: Layout, remarks: list[str], said: set[str]) -> dict[str, Any]:
    micro = micro_batch_of(job, layout)
    said |= {"recipe.clip", "run.offload_folder"}
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


def _megatron(job: Job, layout: Layout, remarks: list[str], said: set[str]) -> dict[str, Any]:
    said |= {"recipe.clip", "run.micro_batch"}
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
    """Options of the layout that this kind of training has no key for."""
    known = {
        "FSDP": {"recompute=full", "offload=parameters"},
        "DEEPSPEED": {"offload=optimizer", "offload=optimizer-disk"},
        "MEGATRON_LM": {"recompute=selective", "sequence=split", "schedule=1f1b"},
    }.get(kind, set())
    plain = Layout()
    for option in ("schedule", "recompute", "sequence", "balance", "order"):
        if (value := getattr(layout, option)) != getattr(plain, option) and f"{option}={value}" not in known:
            remarks.append(f"run.layout {option}={value}: no key of {kind} says it")
    for value in layout.offload.split("+"):
        if value != "none" and f"offload={value}" not in known:
            remarks.append(f"run.layout offload={value}: no key of {kind} says it")
    if layout.stages_a_rank > 1 and layout.pipeline > 1:
        remarks.append(f"run.layout stages={layout.stages_a_rank}: no key of {kind} says it")
