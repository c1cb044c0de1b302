"""Accelerate: its Accelerator spreads model and optimizer and runs backward; the step is samestep's, and exact."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from samestep import environment
from samestep.engines import accelerate_config
from samestep.engines.base import Abilities, Engine, Preparation
from samestep.engines.native import NativeTrainer
from samestep.engines.precision import Precision
from samestep.errors import LayoutError, UserError
from samestep.layout import DEFAULT_ORDER, Layout
from samestep.parallel.batch_norm import global_batch_norm
from samestep.parallel.blocks import find_blocks
from samestep.parallel.cache import keep_no_cache
from samestep.parallel.dropout import same_dropout
from samestep.parallel.host_memory import HostMemory
from samestep.parallel.moment import Now
from samestep.parallel.parts import Parts
from samestep.parallel.spread import WholeModel
from samestep.parallel.used import Used, UsedAlone, UsedByReplicas, UsedByShards

if TYPE_CHECKING:
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin


class Accelerate(Engine):
    """Replicas by its DistributedDataParallel, shards by its FSDP2; its configuration file is what they take."""

    name = "accelerate"
    abilities: ClassVar[Abilities] = Abilities(
        dimensions=frozenset({"replicate", "shard"}),
        precisions=frozenset({"fp64", "fp32", "bf16"}),
        checkpoints=True,
        adapters=True,
        config="a file that `accelerate config` wrote",
        packages={"accelerate": 'pip install "samestep[accelerate]" would do'},
        skips=True,
    )

    def check(self, layout: Layout, precision: str, config: Path | None) -> None:
        if layout.zero == 1:
            raise LayoutError(
                f'layout "{layout}": engine "accelerate" has no shards of the optimizer state alone; '
                f"zero2x{layout.shard} or fsdp{layout.shard} would do"
            )
        if layout.zero and layout.replicate > 1 and layout.order != DEFAULT_ORDER:
            raise LayoutError(
                f'layout "{layout}": engine "accelerate" numbers the ranks of replicas of shards in one order only; '
                f"order={DEFAULT_ORDER} would do"
            )
        if config is not None:
            accelerate_config.check(config, layout, precision)

    def prepare(self, model: nn.Module, how: Preparation) -> NativeTrainer:
        config = accelerate_config.read(how.details.engine_config) if how.details.engine_config is not None else None
        if config is not None and config.use_cpu and how.device.type != "cpu":
            raise UserError(
                f"{how.details.engine_config}: use_cpu is true, and the job runs on {how.device}; "
                "--device cpu would do"
            )
        keep_no_cache(model)
        now = Now()
        same_dropout(model, now)
        global_batch_norm(model, how.mesh.data_group, now)
        parts = Parts.of(model, how.layout, how.mesh)
        with environment.given(_variables(debug=config is not None and config.debug)), _quiet():
            accelerator = _accelerator(model, how.layout, how.device, how.precision, config)
            module = _prepared(accelerator, model)
            optimizer = how.optimizer_of(model.named_parameters())
            prepared: Optimizer = accelerator.prepare_optimizer(optimizer)
        in_precision = _Precision(how.precision, how.device, accelerator)
        used: Used = UsedAlone()
        if how.layout.zero:
            used = UsedByShards(model, how.mesh.data_group, may_differ=False)
        elif how.layout.data_ranks > 1:
            used = UsedByReplicas(model, how.mesh.data_group)
        return NativeTrainer(
            model=model,
            spread_model=WholeModel(
                module=module,
                accumulating=partial(accelerator.no_sync, module),
                used=used,
                model=model,
                parts=parts,
                now=now,
                autocast=in_precision.autocast,
                host=HostMemory(how.device),
            ),
            optimizer=prepared,
            # Not prepared: Accelerate would step it once a process, and so n times too often.
            schedule=how.schedule_of(optimizer),
            precision=in_precision,
            clip=how.clip,
            mesh=how.mesh,
            device=how.device,
        )


class _Precision(Precision):
    """Backward as Accelerate runs it."""

    def __init__(self, name: str, device: torch.device, accelerator: "Accelerator") -> None:
        super().__init__(name, device)
        self._accelerator = accelerator

    def backward(self, loss: Tensor) -> None:
        self._accelerator.backward(loss)


def _variables(*, debug: bool) -> dict[str, str]:
    """What Accelerate reads from the environment, where `accelerate launch` may have left what this job isn't."""
    return {
        **accelerate_config.for_import(),
        "ACCELERATE_USE_FSDP": "false",  # else it would make shards of its own choice; a plugin is given to it
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
    if not accelerator.is_fsdp2:
        return accelerator.prepare_model(model)
    # It wants an optimizer beside the model, whose parameters it then replaces by their shards. The job's optimizer
    # is made of the shards, since not every fused kernel knows them.
    stand_in = torch.optim.SGD(model.parameters())
    module, _ = accelerator.prepare(model, stand_in)
    return module


def _shards(model: nn.Module, layout: Layout, precision: str, config: Any) -> "FullyShardedDataParallelPlugin":
    from accelerate.utils import FullyShardedDataParallelPlugin
    from torch.distributed.fsdp import MixedPrecisionPolicy

    settings: dict[str, Any] = {
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_cls_names_to_wrap": sorted({type(block).__name__ for block in find_blocks(model)}),
        "cpu_ram_efficient_loading": False,
    }
    if config is not None and config.fsdp_config:
        settings |= accelerate_config.plugin_settings(config.fsdp_config)
        accelerate_config.check_model(settings, model)
    if precision == "bf16":
        # Accelerate's own policy would sum gradients over ranks in bf16, and lose digits.
        settings["mixed_precision_policy"] = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        )
    return FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward=layout.zero == 3, **settings)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what Accelerate warns of when it is used as it has to be."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*broadcast_buffers")
        warnings.filterwarnings("ignore", message="Slicing a flattened dim from root mesh")
        yield
