"""Horovod: its DistributedOptimizer averages gradients while backward runs; samestep weighs, clips and steps."""

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from samestep.data.loader import StepBatch
from samestep.engines import horovod_config  # pyright: ignore[reportMissingImports]
from samestep.engines.base import Abilities, Engine, Loss, Preparation
from samestep.engines.horovod_config import Settings
from samestep.engines.horovod_start import start
from samestep.engines.native import NativeTrainer
from samestep.engines.precision import Precision
from samestep.layout import Layout
from samestep.parallel.batch_norm import global_batch_norm
from samestep.parallel.cache import keep_no_cache
from samestep.parallel.dropout import same_dropout
from samestep.parallel.host_memory import HostMemory
from samestep.parallel.moment import Now
from samestep.parallel.parts import Parts
from samestep.parallel.spread import WholeModel
from samestep.parallel.used import UsedByReplicas


class Horovod(Engine):
    """Replicas, with gradients averaged by Horovod in fused messages."""

    name = "horovod"
    abilities: ClassVar[Abilities] = Abilities(
        dimensions=frozenset({"replicate"}),
        precisions=frozenset({"fp64", "fp32", "bf16"}),
        checkpoints=True,
        config="a YAML file with compression, fusion_threshold_mb, cycle_time_ms, messages",
        packages={"horovod": "make horovod builds it against this PyTorch"},
    )

    def check(self, layout: Layout, precision: str, config: Path | None) -> None:
        horovod_config.check_built(horovod_config.read(config))

    def prepare(self, model: nn.Module, how: Preparation) -> "HorovodTrainer":
        import horovod.torch as hvd  # pyright: ignore[reportMissingImports]

        settings = horovod_config.read(how.details.engine_config)
        start(settings)
        keep_no_cache(model)
        now = Now()
        same_dropout(model, now)
        global_batch_norm(model, how.mesh.data_group, now)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = distributed(how.optimizer_of(model.named_parameters()), model, settings)
        in_precision = Precision(how.precision, how.device)
        return HorovodTrainer(
            model=model,
            spread_model=WholeModel(
                module=model,
                accumulating=nullcontext,
                used=_UsedOnceSynchronized(model, how.mesh.data_group, optimizer),
                model=model,
                parts=Parts.of(model, how.layout, how.mesh),
                now=now,
                autocast=in_precision.autocast,
                host=HostMemory(how.device),
            ),
            optimizer=optimizer,
            schedule=how.schedule_of(optimizer),
            precision=in_precision,
            clip=how.clip,
            mesh=how.mesh,
            device=how.device,
            settings=settings,
        )


def distributed(optimizer: Optimizer, model: nn.Module, settings: Settings) -> Any:
    """Horovod's optimizer with the groups of this one, and with rank 0's state where there is one.

    Of an optimizer that has not stepped nothing is broadcast: `hvd.broadcast_optimizer_state` would make its state by
    a step with gradients of zero, with which AdamW counts a step and decays the weights.
    """
    import horovod.torch as hvd  # pyright: ignore[reportMissingImports]

    made = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=getattr(hvd.Compression, settings.compression),
        op=hvd.Average,
    )
    if optimizer.state:
        made.load_state_dict(optimizer.state_dict())
        hvd.broadcast_optimizer_state(made, root_rank=0)
    return made


class HorovodTrainer(NativeTrainer):
    """Takes NativeTrainer's steps with an optimizer of Horovod's."""

    def __init__(self, *, optimizer: Any, settings: Settings, **common: Any) -> None:
        super().__init__(optimizer=optimizer, **common)
        self._horovod: Any = optimizer
        self._settings = settings

    def backward(self, batch: StepBatch, loss: Loss) -> Tensor:
        # Gradients are sent in the last backward of a step. Every rank has as many, of lent samples if need be.
        self._horovod.set_backward_passes_per_step(len(batch.micro_batches))
        return super().backward(batch, loss)

    def update(self) -> None:
        with self._horovod.skip_synchronize():  # it was done before the norm was taken
            super().update()

    def sent(self) -> Mapping[str, int]:
        ranks = dist.get_world_size()
        each = [self._settings.bytes_sent(p) for p in self.model.parameters() if p.requires_grad]
        # A ring all-reduce, as comm.traffic counts those of torch.distributed.
        return {"all-reduce": round(2 * (ranks - 1) / ranks * sum(each))}


class _UsedOnceSynchronized(UsedByReplicas):
    """Horovod sends zeros itself for what this rank did not use, so backward need not reach every parameter."""

    def __init__(self, model: nn.Module, group: dist.ProcessGroup, optimizer: Any) -> None:
        super().__init__(model, group)
        self._optimizer = optimizer

    def reach(self, loss: Tensor) -> Tensor:
        return loss

    def settle(self) -> None:
        self._optimizer.synchronize()
        super().settle()
