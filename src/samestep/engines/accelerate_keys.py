"""What the keys of an `accelerate config` file mean: its distributed type, precision, shards, sizes and compilation.

The engine holds them against a job here, and `translate` makes a job of them. The engine has the file read by
Accelerate itself, which refuses unknown keys and fills in defaults; each section is a mapping for both.
"""

from collections.abc import Mapping
from typing import Any

from samestep.engines.config_file import check_section, switch_of
from samestep.errors import UserError

# Types without a section of their own: all other replicas begin with MULTI_ too, such as MULTI_GPU and MULTI_XPU.
KINDS = ("NO", "MULTI_CPU", "FSDP", "DEEPSPEED", "MEGATRON_LM")

# The sizes of `parallelism_config`, and the layout's.
AXES = {"dp_replicate_size": "replicate", "dp_shard_size": "shard", "tp_size": "tensor", "cp_size": "context"}

# All keys of `fsdp_config`, of FSDP1 and of FSDP2.
FSDP_KEYS = frozenset(
    {
        "fsdp_activation_checkpointing",
        "fsdp_activation_checkpointing_offload",
        "fsdp_auto_wrap_policy",
        "fsdp_backward_prefetch",
        "fsdp_backward_prefetch_policy",
        "fsdp_cpu_ram_efficient_loading",
        "fsdp_forward_prefetch",
        "fsdp_ignored_modules",
        "fsdp_min_num_params",
        "fsdp_offload_params",
        "fsdp_reshard_after_forward",
        "fsdp_sharding_strategy",
        "fsdp_state_dict_type",
        "fsdp_sync_module_states",
        "fsdp_transformer_layer_cls_to_wrap",
        "fsdp_use_orig_params",
        "fsdp_version",
    }
)

# FSDP1's sharding strategies: the ZeRO stage, and whether only over the ranks of a machine.
_STRATEGIES = {
    "FULL_SHARD": (3, False),
    "SHARD_GRAD_OP": (2, False),
    "NO_SHARD": (0, False),
    "HYBRID_SHARD": (3, True),
    "HYBRID_SHARD_ZERO2": (2, True),
}


def replicates(kind: str) -> bool:
    """Whether a `distributed_type` replicates the model: on CPUs, or on any kind of accelerator."""
    return kind.startswith("MULTI_")


def short_keys(section: Any, name: str, prefix: str) -> dict[str, Any]:
    """The section `name` without the prefix of its keys. Raises UserError for a value that is no section."""
    section = section or {}
    check_section(section, name)
    return {str(key).removeprefix(prefix): value for key, value in section.items()}


def fsdp_keys(section: Any) -> dict[str, Any]:
    """The section `fsdp_config`, whose keys Accelerate takes with and without the prefix."""
    section = section or {}
    check_section(section, "fsdp_config")
    return {key if str(key).startswith("fsdp") else f"fsdp_{key}": value for key, value in section.items()}


def is_fsdp2(fsdp: Mapping[str, Any]) -> bool:
    return str(fsdp.get("fsdp_version", 1)) == "2"


def reshards(fsdp: Mapping[str, Any]) -> bool | None:
    """Whether FSDP2 shards parameters again after forward, which is ZeRO-3; None for a value that it doesn't have."""
    return switch_of(fsdp.get("fsdp_reshard_after_forward", True))


def sharding_of(fsdp: Mapping[str, Any]) -> tuple[int, bool]:
    """The ZeRO stage, and whether each machine has a replica of the shards.

    FSDP2 goes by `fsdp_reshard_after_forward` alone; the strategy is FSDP1's.
    """
    strategy = None if is_fsdp2(fsdp) else fsdp.get("fsdp_sharding_strategy")
    setting = strategy if strategy is not None else fsdp.get("fsdp_reshard_after_forward")
    if setting is None:
        return 3, False
    if str(setting).lower() in ("true", "false"):
        return (3 if switch_of(setting) else 2), False
    names = list(_STRATEGIES)
    name = names[int(setting) - 1] if str(setting) in {"1", "2", "3", "4", "5"} else str(setting).upper()
    if name not in _STRATEGIES:
        raise UserError(f"fsdp_config.fsdp_sharding_strategy is {setting}; use {', '.join(names)}")
    return _STRATEGIES[name]


def precision_of(mixed_precision: Any, *, fp16: Any = None) -> str:
    """no, fp16, bf16 or fp8. `fp16` is the key of older versions, which counts where there is no newer one."""
    if mixed_precision is None and switch_of(fp16):
        return "fp16"
    precision = str(mixed_precision or "no").lower()
    precision = "no" if precision == "false" else precision  # YAML reads a bare no as false
    if precision not in ("no", "fp16", "bf16", "fp8"):
        raise UserError(f"mixed_precision is {precision}; use no, fp16, bf16 or fp8")
    return precision


def compiler_of(dynamo: Mapping[str, Any], older: Any = None) -> str | None:
    """The backend that compiles the model, of `dynamo_config` (short keys) or of older files' key; None for none."""
    backend = dynamo.get("backend") if older is None else older
    return None if backend is None or str(backend).upper() in ("NO", "FALSE") else str(backend)
