"""Accelerate: its Accelerator spreads model and optimizer and runs backward; the step is samestep's, and exact.

A user's `accelerate config` file is read by Accelerate itself, and held against the recipe and the layout.

What is whose: Accelerate wraps the model (DDP, or FSDP2 by its plugin), casts, and runs backward; samestep cuts the
batch, weighs the loss by the global batch (`NativeTrainer.gradient_scale`), clips by the whole gradient's norm and
steps. Accelerate's wrapper of schedules stays out of use, as it steps once for each process.
"""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from samestep import environment
from samestep.display.page import Words
from samestep.engines.accelerate_keys import (
    AXES,
    FSDP_KEYS,
    compiler_of,
    fsdp_keys,
    is_fsdp2,
    precision_of,
    replicates,
    reshards,
    short_keys,
)
from samestep.engines.base import Abilities, Engine, Preparation
from samestep.engines.config_file import yaml_section
from samestep.engines.native.trainer import NativeTrainer
from samestep.engines.precision import Precision
from samestep.engines.setup import TrainerSetup, spread_by_engine
from samestep.errors import LayoutError, UserError, closest
from samestep.launch.device import accelerators
from samestep.layout import DEFAULT_ORDER, Layout
from samestep.parallel.blocks import find_blocks
from samestep.parallel.exact.batch_norm import global_batch_norm
from samestep.parallel.exact.buffers import keep_no_cache
from samestep.parallel.exact.dropout import same_dropout
from samestep.parallel.exact.forward_context import ForwardContext
from samestep.parallel.sharding import ShardTable
from samestep.parallel.unused_parameters import (
    UnusedParameters,
    UnusedParametersAlone,
    UnusedParametersOfReplicas,
    UnusedParametersOfShards,
)

if TYPE_CHECKING:
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin

_PRECISIONS = {"fp32": "no", "fp64": "no", "bf16": "bf16"}

# Sections that another part of samestep has instead, or nothing has; refused where they say something.
_REFUSED = {
    "fp8_config": "engine native with recipe.precision: bf16",
    "megatron_lm_config": "engine native with a tp or pp layout",
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


def read(path: Path) -> Any:
    """Read the file as Accelerate's ClusterConfig.

    Raises UserError where the file is no YAML or has a key twice, as `samestep translate` does, and with Accelerate's
    own message for keys and values that it doesn't take.
    """
    yaml_section(path)
    with environment.given(for_import()):
        from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file

    try:
        config = load_config_from_file(str(path))
    except Exception as error:  # a parser's, or one of many kinds for a key or a value
        raise UserError(f"{path}: no configuration that Accelerate reads: {error}") from None
    if not isinstance(config, ClusterConfig):
        raise UserError(f"{path}: compute_environment is AMAZON_SAGEMAKER; use LOCAL_MACHINE")
    return config


def for_import() -> dict[str, str]:
    """Environment for importing Accelerate: it imports DeepSpeed, which warns at length on machines without GPU."""
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
    try:
        configured, expected = precision_of(config.mixed_precision), _PRECISIONS.get(precision)
        compiler = compiler_of(short_keys(config.dynamo_config, "dynamo_config", "dynamo_"))
        shards = fsdp_keys(config.fsdp_config)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    if expected is not None and configured != expected:
        raise UserError(
            f"{path}: mixed_precision is {configured!r}, and recipe.precision is {precision}, which is {expected!r} "
            "there; they have to agree"
        )
    for section, instead in _REFUSED.items():
        if getattr(config, section):
            raise UserError(f'{path}: engine "accelerate" does not take {section}; use {instead}')
    if compiler is not None:
        raise UserError(
            f'{path}: engine "accelerate" does not take dynamo_config; use run.compile: true with engine native'
        )
    _check_sizes(path, config.parallelism_config, layout)
    if layout.zero:
        _check_shards(path, shards, layout)


def _check_type(path: Path, config: Any, layout: Layout) -> None:
    """Raise UserError for a distributed_type that isn't what the layout is."""
    kind = str(getattr(config.distributed_type, "value", config.distributed_type))
    if kind == "DEEPSPEED":
        raise UserError(f"{path}: distributed_type is DEEPSPEED; use engine deepspeed with its own configuration")
    if kind == "FSDP":
        fits, fitting = layout.zero >= 2, "fsdp2"
    elif replicates(kind):
        fits, fitting = layout.zero == 0, "dp2"
    elif kind == "NO":
        fits, fitting = layout.size == 1, "single"
    else:
        raise UserError(
            f'{path}: distributed_type is {kind}, which engine "accelerate" does not have; use '
            "NO, MULTI_CPU, MULTI_GPU or FSDP (in quotes)"
        )
    if not fits:
        raise UserError(
            f'{path}: distributed_type is {kind}, which layout "{layout}" is not; use a layout such as {fitting}'
        )


def _check_sizes(path: Path, sizes: Mapping[str, Any], layout: Layout) -> None:
    """Raise UserError where the file's parallelism_config has other sizes than the layout."""
    for key, axis in AXES.items():
        size = sizes.get(f"parallelism_config_{key}", getattr(layout, axis))
        if size != getattr(layout, axis):
            raise UserError(
                f'{path}: parallelism_config_{key} is {size}, and layout "{layout}" has '
                f"{getattr(layout, axis)}; they have to agree"
            )


def _check_shards(path: Path, keys: Mapping[str, Any], layout: Layout) -> None:
    """Raise UserError for FSDP settings that would shard otherwise than the layout says, or that are unknown."""
    if not is_fsdp2(keys):
        raise UserError(
            f"{path}: fsdp_version is {keys.get('fsdp_version', 1)}; use the file for 2 that "
            f"`accelerate to-fsdp2 --config_file {path.name} --output_file NEW` writes"
        )
    if reshards(keys) is not (layout.zero == 3):
        reshard = keys.get("fsdp_reshard_after_forward", True)
        raise UserError(
            f'{path}: fsdp_reshard_after_forward is {reshard}, and layout "{layout}" is ZeRO-{layout.zero}; '
            f"true goes with fsdp{layout.shard}, false with zero2x{layout.shard}"
        )
    for key, value in keys.items():
        if key in _REFUSED_OF_FSDP and value:
            raise UserError(f'{path}: engine "accelerate" does not take {key}; use {_REFUSED_OF_FSDP[key]}')
        if key not in FSDP_KEYS:
            raise UserError(f"{path}: fsdp_config has {key}, which Accelerate does not know; take it out")
    from accelerate.utils.constants import FSDP_AUTO_WRAP_POLICY

    policy = keys.get("fsdp_auto_wrap_policy", "NO_WRAP")
    if str(policy).upper() not in FSDP_AUTO_WRAP_POLICY:
        raise UserError(f"{path}: fsdp_auto_wrap_policy is {policy}; it can be {', '.join(FSDP_AUTO_WRAP_POLICY)}")


def plugin_settings(settings_of_file: Mapping[str, Any]) -> dict[str, Any]:
    """The section `fsdp_config` as arguments of Accelerate's plugin."""
    settings_of_file = fsdp_keys(settings_of_file)
    settings = {
        argument: settings_of_file[key] for key, argument in _PLUGIN.items() if settings_of_file.get(key) is not None
    }
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
                    f"fsdp_auto_wrap_policy is SIZE_BASED_WRAP, which makes an FSDP unit of the list {name} "
                    f"({type(module).__name__}), and FSDP2 takes no lists; use TRANSFORMER_BASED_WRAP"
                )


class Accelerate(Engine):
    """Replicas by its DistributedDataParallel, shards by its FSDP2; its configuration file is what they take."""

    name = "accelerate"
    abilities: ClassVar[Abilities] = Abilities(
        about=Words("Accelerate's DDP and FSDP2, with your YAML", "Accelerate 的 DDP 与 FSDP2，可带你的 YAML"),
        axes=frozenset({"replicate", "shard"}),
        stages=frozenset({2, 3}),
        precisions=frozenset({"fp64", "fp32", "bf16"}),
        checkpoints=True,
        adapters=True,
        config="a file that `accelerate config` wrote",
        packages={"accelerate": 'use pip install "samestep[accelerate]"'},
        skips=True,
    )

    def check(self, layout: Layout, precision: str, config: Path | None) -> None:
        """Raise LayoutError for a layout that Accelerate doesn't have, UserError for a file that contradicts it."""
        if layout.zero and layout.replicate > 1 and layout.order != DEFAULT_ORDER:
            raise LayoutError(
                f'layout "{layout}": engine "accelerate" numbers the ranks of replicas of shards in one order only; '
                f"use order={DEFAULT_ORDER}"
            )
        if config is not None:
            check(config, layout, precision)

    def prepare(self, model: nn.Module, how: Preparation) -> NativeTrainer:
        """The model is made exact first (dropout, batch norm), then wrapped, as in `parallel.apply`.

        The optimizer is made after the model was sharded, of the parameters that are left then.
        """
        config = read(how.options.engine_config) if how.options.engine_config is not None else None
        if config is not None and config.use_cpu and how.device.type != "cpu":
            raise UserError(
                f"{how.options.engine_config}: use_cpu is true, and the job runs on {how.device}; use --device cpu"
            )
        keep_no_cache(model)
        forward_context = ForwardContext()
        same_dropout(model, forward_context)
        global_batch_norm(model, how.mesh.data_group, forward_context)
        parts = ShardTable.of(model, how.layout, how.mesh)
        with environment.given(_variables(debug=config is not None and config.debug)), _quiet():
            accelerator = _accelerator(model, how.layout, how.device, how.options.precision, config)
            module = _prepared(accelerator, model)
            optimizer = how.optimizer_of(model.named_parameters())
            prepared: Optimizer = accelerator.prepare_optimizer(optimizer)
        in_precision = _Precision(how.options.precision, how.device, accelerator)
        used: UnusedParameters = UnusedParametersAlone()
        if how.layout.zero:
            used = UnusedParametersOfShards(model, how.mesh.data_group, may_differ=False)
        elif how.layout.data_ranks > 1:
            used = UnusedParametersOfReplicas(model, how.mesh.data_group)
        accumulating = partial(accelerator.no_sync, module)
        setup = TrainerSetup(
            how=how,
            model=model,
            spread_model=spread_by_engine(
                model,
                how,
                in_precision,
                forward_context,
                module=module,
                used=used,
                accumulating=accumulating,
                parts=parts,
            ),
            optimizer=prepared,
            # Not prepared: Accelerate would step it once a process, and so n times too often.
            schedule=how.schedule_of(optimizer),
            precision=in_precision,
        )
        return NativeTrainer(setup)


class _Precision(Precision):
    """Precision whose backward is Accelerate's."""

    def __init__(self, name: str, device: torch.device, accelerator: "Accelerator") -> None:
        super().__init__(name, device)
        self._accelerator = accelerator

    def backward(self, loss: Tensor) -> None:
        self._accelerator.backward(loss)


def _variables(*, debug: bool) -> dict[str, str]:
    """Values for Accelerate's environment variables, which override those that `accelerate launch` may have set."""
    return {
        **for_import(),
        "ACCELERATE_USE_FSDP": "false",  # FSDP is configured by the plugin that is passed in
        "ACCELERATE_USE_DEEPSPEED": "false",
        "ACCELERATE_USE_MEGATRON_LM": "false",
        "ACCELERATE_USE_PARALLELISM_CONFIG": "false",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1",  # micro-batches are weighed by their samples
        "ACCELERATE_DYNAMO_BACKEND": "no",
        "ACCELERATE_DEBUG_MODE": str(debug).lower(),
        # Where it is not set, Accelerate changes the number of threads.
        "OMP_NUM_THREADS": str(torch.get_num_threads()),
    }


def _accelerator(
    model: nn.Module, layout: Layout, device: torch.device, precision: str, config: Any
) -> "Accelerator":
    """An Accelerator for this layout. It changes state of the whole process, which is reset before."""
    from accelerate import Accelerator, DistributedDataParallelKwargs
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.utils import DistributedType, ParallelismConfig

    # They are of the whole process, and may be another training's.
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    replicas = DistributedDataParallelKwargs(gradient_as_bucket_view=True, broadcast_buffers=False)
    plugin = shards = None
    if layout.zero:
        plugin = _shards(model, layout, precision, config)
        shards = ParallelismConfig(dp_replicate_size=layout.replicate, dp_shard_size=layout.shard)
    on_cpu = device.type == "cpu"
    accelerator = Accelerator(
        cpu=on_cpu,
        mixed_precision="bf16" if precision == "bf16" else "no",
        fsdp_plugin=None if on_cpu else plugin,
        parallelism_config=None if on_cpu else shards,
        kwargs_handlers=[replicas],
    )
    if on_cpu and plugin is not None and shards is not None:
        # Accelerate turns FSDP on for accelerators alone: on CPUs it would train replicas without a word.
        state: Any = accelerator.state
        state.distributed_type = DistributedType.FSDP
        state.fsdp_plugin = plugin
        state.parallelism_config = shards
        state.device_mesh = shards.get_device_mesh(device.type)
    return accelerator


def _prepared(accelerator: "Accelerator", model: nn.Module) -> nn.Module:
    """Let Accelerate wrap the model."""
    if not accelerator.is_fsdp2:
        return accelerator.prepare_model(model)
    # For FSDP2, `prepare` requires an optimizer, whose parameters it replaces by shards. The job's own optimizer is
    # made after this from the shards, since not every fused kernel supports them.
    stand_in = torch.optim.SGD(model.parameters())
    module, _ = accelerator.prepare(model, stand_in)
    return module


def _shards(model: nn.Module, layout: Layout, precision: str, config: Any) -> "FullyShardedDataParallelPlugin":
    """Make Accelerate's FSDP plugin: one FSDP unit for each block, as in the native engine, or by the user's file."""
    from accelerate.utils import FullyShardedDataParallelPlugin
    from torch.distributed.fsdp import MixedPrecisionPolicy

    settings: dict[str, Any] = {
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_cls_names_to_wrap": sorted({type(block).__name__ for block in find_blocks(model)}),
        "cpu_ram_efficient_loading": False,
    }
    if config is not None and config.fsdp_config:
        settings |= plugin_settings(config.fsdp_config)
        check_model(settings, model)
    if precision == "bf16":
        # Accelerate's default policy would reduce gradients in bf16, which loses precision.
        settings["mixed_precision_policy"] = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        )
    return FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward=layout.zero == 3, **settings)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence warnings that Accelerate and PyTorch give for correct use."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*broadcast_buffers")
        warnings.filterwarnings("ignore", message="Slicing a flattened dim from root mesh")
        yield
