"""A user's `accelerate config` file: read by Accelerate itself, and held against the recipe and the layout."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from samestep import environment
from samestep.cluster.device import accelerators
from samestep.errors import UserError, closest
from samestep.layout import Layout

_REPLICAS = frozenset({"MULTI_CPU", "MULTI_GPU", "MULTI_XPU", "MULTI_NPU", "MULTI_MLU", "MULTI_MUSA", "MULTI_HPU"})
_PRECISIONS = {"fp32": "no", "fp64": "no", "bf16": "bf16"}

# Sections that another part of samestep has instead, or nothing has; refused where they say something.
_REFUSED = {
    "fp8_config": "engine native with recipe.precision: bf16",
    "megatron_lm_config": "engine native with a tp or pp layout",
    "dynamo_config": "run.compile: true with engine native",
}
_REFUSED_OF_FSDP = {
    "fsdp_offload_params": "engine native with offload=parameters in the layout",
    "fsdp_activation_checkpointing": "engine native with recompute=full in the layout",
    "fsdp_activation_checkpointing_offload": "engine native with offload=activations in the layout",
    "fsdp_ignored_modules": "leaving it out",
}
# What FSDP2 takes of the file: Accelerate's key -> its plugin's argument.
_PLUGIN = {
    "fsdp_auto_wrap_policy": "auto_wrap_policy",
    "fsdp_transformer_layer_cls_to_wrap": "transformer_cls_names_to_wrap",
    "fsdp_min_num_params": "min_num_params",
    "fsdp_cpu_ram_efficient_loading": "cpu_ram_efficient_loading",
}
# What it has no use for: of FSDP1, or of checkpoints, which are samestep's.
_UNUSED_OF_FSDP = frozenset(
    {
        "fsdp_version",
        "fsdp_reshard_after_forward",
        "fsdp_state_dict_type",
        "fsdp_backward_prefetch",
        "fsdp_backward_prefetch_policy",
        "fsdp_forward_prefetch",
        "fsdp_sharding_strategy",
        "fsdp_sync_module_states",
        "fsdp_use_orig_params",
    }
)
_SIZES = {"dp_replicate_size": "replicate", "dp_shard_size": "shard", "tp_size": "tensor", "cp_size": "context"}


def read(path: Path) -> Any:
    """The file as Accelerate's ClusterConfig. Raises UserError with what Accelerate says against it."""
    with environment.given(for_import()):
        from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file

    try:
        config = load_config_from_file(str(path))
    except Exception as error:  # a parser's, or one of many kinds for a key or a value
        raise UserError(f"{path}: no configuration that Accelerate reads: {error}") from None
    if not isinstance(config, ClusterConfig):
        raise UserError(f"{path}: compute_environment is AMAZON_SAGEMAKER; LOCAL_MACHINE would do")
    return config


def for_import() -> dict[str, str]:
    """Variables to import Accelerate under: it imports DeepSpeed, which tells at length that it found no GPU."""
    return {} if accelerators() else {"DS_ACCELERATOR": "cpu"}


def check(path: Path, layout: Layout, precision: str) -> None:
    """Raise UserError where the file asks for another job than the recipe and the layout do."""
    config = read(path)
    _check_type(path, config, layout)
    processes = config.num_processes
    if processes not in (-1, layout.size):
        raise UserError(
            f'{path}: num_processes is {processes}, and layout "{layout}" needs {layout.size}; they have to agree'
        )
    asked, wanted = config.mixed_precision or "no", _PRECISIONS.get(precision)
    if wanted is not None and asked != wanted:
        raise UserError(
            f"{path}: mixed_precision is {asked!r}, and recipe.precision is {precision}, which is {wanted!r} there; "
            "they have to agree"
        )
    for section, instead in _REFUSED.items():
        if getattr(config, section):
            raise UserError(f'{path}: engine "accelerate" does not take {section}; {instead} would do')
    _check_sizes(path, config.parallelism_config, layout)
    if layout.zero:
        _check_shards(path, config.fsdp_config, layout)


def _check_type(path: Path, config: Any, layout: Layout) -> None:
    kind = str(getattr(config.distributed_type, "value", config.distributed_type))
    if kind == "DEEPSPEED":
        raise UserError(
            f"{path}: distributed_type is DEEPSPEED; engine deepspeed with its own configuration would do"
        )
    if kind == "FSDP":
        fits, would_do = layout.zero >= 2, "fsdp2"
    elif kind in _REPLICAS:
        fits, would_do = layout.zero == 0, "dp2"
    elif kind == "NO":
        fits, would_do = layout.size == 1, "single"
    else:
        raise UserError(
            f'{path}: distributed_type is {kind}, which engine "accelerate" does not have; '
            "NO, MULTI_CPU, MULTI_GPU or FSDP would do (in quotes)"
        )
    if not fits:
        raise UserError(
            f'{path}: distributed_type is {kind}, which layout "{layout}" is not; such as {would_do} would do'
        )


def _check_sizes(path: Path, sizes: Mapping[str, Any], layout: Layout) -> None:
    for key, dimension in _SIZES.items():
        asked = sizes.get(f"parallelism_config_{key}", getattr(layout, dimension))
        if asked != getattr(layout, dimension):
            raise UserError(
                f'{path}: parallelism_config_{key} is {asked}, and layout "{layout}" has '
                f"{getattr(layout, dimension)}; they have to agree"
            )


def _check_shards(path: Path, given: Mapping[str, Any], layout: Layout) -> None:
    version = given.get("fsdp_version", 1)
    if str(version) != "2":
        raise UserError(
            f"{path}: fsdp_version is {version}; `accelerate to-fsdp2 --config_file {path.name} --output_file NEW` "
            "writes the file for 2, which would do"
        )
    reshard = given.get("fsdp_reshard_after_forward", True)
    if reshard is not (layout.zero == 3):
        raise UserError(
            f'{path}: fsdp_reshard_after_forward is {reshard}, and layout "{layout}" is ZeRO-{layout.zero}; '
            f"true goes with fsdp{layout.shard}, false with zero2x{layout.shard}"
        )
    for key, value in given.items():
        if key in _REFUSED_OF_FSDP and value:
            raise UserError(f'{path}: engine "accelerate" does not take {key}; {_REFUSED_OF_FSDP[key]} would do')
        if key not in _REFUSED_OF_FSDP and key not in _PLUGIN and key not in _UNUSED_OF_FSDP:
            raise UserError(f"{path}: fsdp_config has {key}, which Accelerate does not know; take it out")
    from accelerate.utils.constants import FSDP_AUTO_WRAP_POLICY

    policy = given.get("fsdp_auto_wrap_policy", "NO_WRAP")
    if str(policy).upper() not in FSDP_AUTO_WRAP_POLICY:
        raise UserError(f"{path}: fsdp_auto_wrap_policy is {policy}; it can be {', '.join(FSDP_AUTO_WRAP_POLICY)}")


def plugin_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """The section `fsdp_config` as arguments of Accelerate's plugin."""
    settings = {argument: given[key] for key, argument in _PLUGIN.items() if given.get(key) is not None}
    settings.setdefault("auto_wrap_policy", "NO_WRAP")
    names = settings.get("transformer_cls_names_to_wrap")
    if isinstance(names, str):
        settings["transformer_cls_names_to_wrap"] = [name.strip() for name in names.split(",")]
    return settings


def check_model(settings: Mapping[str, Any], model: nn.Module) -> None:
    """Raise UserError where the file wraps layers that the model has not, or that FSDP2 doesn't take."""
    policy = str(settings["auto_wrap_policy"]).upper()
    there = {type(module).__name__ for module in model.modules()}
    named = settings.get("transformer_cls_names_to_wrap") or ()
    for name in named if policy == "TRANSFORMER_BASED_WRAP" else ():
        if name not in there:
            raise UserError(
                f"fsdp_transformer_layer_cls_to_wrap is {name}, which is the class of no layer of this model; "
                f"{closest(name, there)}"
            )
    if policy == "SIZE_BASED_WRAP":
        least = settings.get("min_num_params", 0)
        for name, module in model.named_modules():
            lists = isinstance(module, (nn.ModuleList, nn.ModuleDict))
            if lists and sum(parameter.numel() for parameter in module.parameters()) > least:
                raise UserError(
                    f"fsdp_auto_wrap_policy is SIZE_BASED_WRAP, by which Accelerate makes a unit of {name} "
                    f"({type(module).__name__}), and FSDP2 takes no lists; TRANSFORMER_BASED_WRAP would do"
                )
