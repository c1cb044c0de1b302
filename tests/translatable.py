"""Configurations of other tools, with what each says of a job and what has no counterpart."""

from typing import Any

BATCH = {"train_batch_size": 24, "train_micro_batch_size_per_gpu": 3}
RANKS = {"recipe.batch": 24, "run.micro_batch": 3}


def smp(**parameters: Any) -> dict[str, Any]:
    return {"smdistributed": {"modelparallel": {"enabled": True, "parameters": parameters}}}


# A source, further words, what the job says (beside `unsaid` clipping and optimizer), and what a remark says.
DEEPSPEED: dict[str, tuple[dict[str, Any], str, dict[str, Any], str]] = {
    "the batch identity gives the ranks": (
        {**BATCH, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 1}},
        "",
        {**RANKS, "run.layout": "zero1x4"},
        "gradient_clipping: not given, which is 1.0",
    ),
    "ranks that nobody says": (
        {**BATCH, "zero_optimization": {"stage": 3}},
        "",
        {**RANKS, "run.layout": "fsdp"},
        "optimizer: not in the file",
    ),
    "ranks that the command line says": (
        {"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2},
        "--processes 4",
        {**RANKS, "run.layout": "dp4"},
        "",
    ),
    "micro-batch from the batch": (
        {"train_batch_size": 24, "gradient_accumulation_steps": 2},
        "--processes 4",
        {**RANKS, "run.layout": "dp4"},
        "",
    ),
    "slices and parts of tokens": (
        {**BATCH, "tensor_parallel": {"autotp_size": 2}, "sequence_parallel_size": 2},
        "--processes 16",
        {**RANKS, "run.layout": "dp4 cp2 tp2"},
        "",
    ),
    "a pipeline": (
        {**BATCH, "pipeline": {"stages": 2, "activation_checkpoint_interval": 1, "partition": "uniform"}},
        "",
        {**RANKS, "run.layout": "pp2 dp recompute=full"},
        "pipeline.partition = 'uniform': stages are cut by cost",
    ),
    "offload to disk": (
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/fast"}}},
        "--batch 24",
        {"recipe.batch": 24, "run.layout": "zero2x offload=optimizer-disk", "run.offload_folder": "/fast"},
        "",
    ),
    "offload of parameters": (
        {
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "nvme", "nvme_path": "/fast"},
                "offload_optimizer": {"device": "cpu"},
            },
            "activation_checkpointing": {"cpu_checkpointing": True, "partition_activations": True},
        },
        "",
        {
            "run.layout": "fsdp recompute=full offload=activations+parameters-disk",
            "run.offload_folder": "/fast",
        },
        "",
    ),
    "fp16 over shards": (
        {**BATCH, "zero_optimization": {"stage": 2}, "fp16": {"enabled": True, "loss_scale_window": 500}},
        "",
        {**RANKS, "recipe.precision": "fp16", "run.layout": "zero2x"},
        "loss_scale_window = 500: the loss is scaled as",
    ),
    "autocast": (
        {**BATCH, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}, "tensorboard": {"enabled": False}},
        "",
        {**RANKS, "recipe.precision": "bf16", "run.log": [], "run.layout": "dp"},
        "",
    ),
    "left to transformers": (
        {"train_batch_size": "auto", "zero_optimization": {"stage": 2}, "fp16": {"enabled": "auto"}},
        "",
        {"run.layout": "zero2x"},
        "train_batch_size = 'auto': filled in by the script",
    ),
    "Adam with nothing but its name": (
        {"optimizer": {"type": "Adam"}, "gradient_clipping": 0},
        "",
        {
            "run.layout": "dp",
            "recipe.optimizer.name": "adamw",
            "recipe.optimizer.lr": 0.001,
            "recipe.optimizer.weight_decay": 0.0,
        },
        "",
    ),
    "SGD": (
        {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "dampening": 0.1}}},
        "",
        {
            "run.layout": "dp",
            "recipe.optimizer.name": "sgd",
            "recipe.optimizer.lr": 0.1,
            "recipe.optimizer.momentum": 0.9,
            "recipe.optimizer.weight_decay": 0.0,
        },
        "dampening = 0.1: momentum has no dampening",
    ),
    "another optimizer": (
        {"optimizer": {"type": "Lamb", "params": {"lr": 0.1}}},
        "",
        {"run.layout": "dp"},
        "optimizer.type = 'Lamb': recipe.optimizer can be adamw or sgd",
    ),
    "a cosine": (
        {
            "optimizer": {"type": "AdamW", "params": {"lr": "1e-4", "weight_decay": 0}},
            "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 90, "warmup_num_steps": 9}},
        },
        "",
        {
            "run.layout": "dp",
            "recipe.steps": 90,
            "recipe.optimizer.name": "adamw",
            "recipe.optimizer.lr": 1e-4,
            "recipe.optimizer.weight_decay": 0.0,
            "recipe.schedule.warmup": 9,
            "recipe.schedule.decay": "cosine",
            "recipe.schedule.final": 1e-4,
        },
        "",
    ),
    "a linear decay from the schedule's own rate": (
        {
            "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "weight_decay": 0}},
            "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 9, "warmup_num_steps": 0}},
        },
        "",
        {
            "run.layout": "dp",
            "recipe.steps": 9,
            "recipe.optimizer.name": "adamw",
            "recipe.optimizer.lr": 1e-3,
            "recipe.optimizer.weight_decay": 0.0,
            "recipe.schedule.decay": "linear",
        },
        "",
    ),
    "another schedule": (
        {"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 1}}},
        "",
        {"run.layout": "dp"},
        "scheduler.params.cycle_min_lr = 1: recipe.schedule has",
    ),
    "keys that nobody knows": (
        {**BATCH, "surprise": 1, "zero_optimization": {"stage": 0, "surprise": 2}},
        "",
        {**RANKS, "run.layout": "dp"},
        r"surprise = 2.*\n(.*\n)*# - surprise = 1: no counterpart",
    ),
}

ACCELERATE: dict[str, tuple[dict[str, Any], str, dict[str, Any], str]] = {
    "replicas on CPUs": (
        {"distributed_type": "MULTI_CPU", "num_processes": 2, "mixed_precision": "no"},
        "--batch 24",
        {"recipe.batch": 24, "run.layout": "dp2", "run.device": "cpu"},
        "",
    ),
    "one process": ({"distributed_type": "NO"}, "", {"run.layout": "single"}, "recipe.batch: not in the file"),
    "FSDP2 without resharding": (
        {
            "distributed_type": "FSDP",
            "num_processes": 4,
            "mixed_precision": "bf16",
            "fsdp_config": {"fsdp_version": 2, "reshard_after_forward": False, "offload_params": True},
        },
        "",
        {"recipe.precision": "bf16", "run.layout": "zero2x4 offload=parameters"},
        "fsdp_config.fsdp_version = 2",
    ),
    "a mesh": (
        {
            "distributed_type": "FSDP",
            "num_processes": 16,
            "fsdp_config": {"fsdp_version": 2},
            "parallelism_config": {
                "parallelism_config_dp_replicate_size": 2,
                "parallelism_config_dp_shard_size": 2,
                "parallelism_config_tp_size": 2,
                "parallelism_config_cp_size": 2,
                "parallelism_config_cp_comm_strategy": "alltoall",
            },
        },
        "",
        {"run.layout": "dp2 fsdp2 cp2 tp2"},
        "cp_comm_strategy = 'alltoall'",
    ),
    "DeepSpeed's plugin": (
        {
            "distributed_type": "DEEPSPEED",
            "num_processes": 4,
            "deepspeed_config": {
                "zero_stage": 3,
                "gradient_clipping": 0.5,
                "offload_param_device": "cpu",
                "gradient_accumulation_steps": 4,
            },
        },
        "",
        {"recipe.clip": 0.5, "run.layout": "fsdp4 offload=parameters"},
        "gradient_accumulation_steps = 4",
    ),
    "Megatron-LM": (
        {
            "distributed_type": "MEGATRON_LM",
            "num_processes": 8,
            "megatron_lm_config": {
                "megatron_lm_tp_degree": 2,
                "megatron_lm_pp_degree": 2,
                "megatron_lm_recompute_activations": True,
                "megatron_lm_use_distributed_optimizer": True,
                "megatron_lm_num_micro_batches": 4,
            },
        },
        "",
        {"run.layout": "pp2 zero1x2 tp2 recompute=selective"},
        "num_micro_batches = 4",
    ),
    "8-bit floats, and a section of another kind": (
        {"distributed_type": "MULTI_GPU", "num_processes": 2, "mixed_precision": "fp8", "fsdp_config": {"x": 1}},
        "",
        {"recipe.precision": "bf16", "run.layout": "dp2"},
        "fsdp_config.x = 1: distributed_type is MULTI_GPU",
    ),
}

SAGEMAKER: dict[str, tuple[dict[str, Any], str, dict[str, Any], str]] = {
    "data parallel": (
        {"distribution": {"smdistributed": {"dataparallel": {"enabled": True, "custom_mpi_options": "-x A"}}}},
        "",
        {"run.layout": "dp"},
        "custom_mpi_options",
    ),
    "torchrun's": ({"torch_distributed": {"enabled": True}}, "--processes 8", {"run.layout": "dp8"}, ""),
    "DDP": ({"pytorchddp": {"enabled": True}}, "", {"run.layout": "dp"}, ""),
    "two launchers, one of them off": (
        {"mpi": {"enabled": True, "processes_per_host": 4}, "pytorchddp": {"enabled": False}},
        "",
        {"run.layout": "dp"},
        "pytorchddp: not enabled",
    ),
    "a parameter server": (
        {"parameter_server": {"enabled": True}},
        "",
        {"run.layout": "dp"},
        "there is no parameter server",
    ),
    "stages alone": (
        smp(partitions=2, microbatches=4, pipeline="simple", optimize="memory"),
        "",
        {"run.layout": "pp2 schedule=gpipe balance=memory"},
        "microbatches = 4: run.micro_batch = samples",
    ),
    "stages, micro-batches and replicas": (
        smp(partitions=2, microbatches=4, pipeline="interleaved", optimize="speed", ddp=True),
        "--processes 8 --batch 64",
        {"recipe.batch": 64, "run.micro_batch": 4, "run.layout": "pp2 dp4 order=dp.fsdp.pp.cp.tp"},
        "",
    ),
    "letters of a placement": (
        smp(pipeline_parallel_degree=2, tensor_parallel_degree=2, ddp=True, placement_strategy="PDT", bf16=True),
        "--processes 8",
        {"recipe.precision": "bf16", "run.layout": "pp2 dp2 tp2 balance=memory"},
        "",
    ),
    "shards of part of the ranks": (
        smp(sharded_data_parallel_degree=4, sdp_gradient_clipping=1.0, activation_checkpointing=True),
        "--processes 8",
        {"recipe.clip": 1.0, "run.layout": "dp2 fsdp4 recompute=full"},
        "",
    ),
    "the second version": (
        smp(hybrid_shard_degree=2, context_parallel_degree=2, sm_activation_offloading=True, random_seed=1),
        "",
        {"run.layout": "dp fsdp2 cp2 order=dp.fsdp.pp.cp.tp offload=activations"},
        "random_seed = 1: recipe.seed says it",
    ),
}

ALL = {
    f"{form}: {name}": case
    for form, cases in {"deepspeed": DEEPSPEED, "accelerate": ACCELERATE, "sagemaker": SAGEMAKER}.items()
    for name, case in cases.items()
}
