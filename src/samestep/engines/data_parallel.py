"""PyTorch's DataParallel: one process whose threads share a batch over the accelerators of this machine."""

import sys
from contextlib import nullcontext
from typing import ClassVar

import torch
from torch import nn

from samestep.cluster.device import accelerators
from samestep.comm.mesh import Mesh
from samestep.engines.base import Abilities, Engine, OptimizerOf, ScheduleOf
from samestep.engines.native import NativeTrainer
from samestep.engines.precision import Precision
from samestep.errors import UserError
from samestep.layout import Layout
from samestep.parallel.cache import keep_no_cache
from samestep.parallel.host_memory import HostMemory
from samestep.parallel.moment import Now
from samestep.parallel.parts import Parts
from samestep.parallel.spread import Details, WholeModel
from samestep.parallel.used import UsedAlone


class DataParallel(Engine):
    """Every forward copies the model to each device, cuts the micro-batch, and gathers the outputs on the first.

    The oldest way and the slowest: kept to be compared with. With fewer than two accelerators it runs on one device.
    """

    name = "data-parallel"
    abilities: ClassVar[Abilities] = Abilities(
        dimensions=frozenset(),
        precisions=frozenset({"fp64", "fp32", "bf16", "fp16"}),
        checkpoints=True,
        skips=True,
    )

    def prepare(
        self,
        model: nn.Module,
        *,
        layout: Layout,
        mesh: Mesh,
        device: torch.device,
        precision: str,
        clip: float | None,
        optimizer_of: OptimizerOf,
        schedule_of: ScheduleOf,
        details: Details,
    ) -> NativeTrainer:
        keep_no_cache(model)
        devices = accelerators() if device.type != "cpu" else 0
        module = model
        if devices < 2:
            there = f"{devices} accelerator{'' if devices == 1 else 's'}"
            print(f"samestep: engine data-parallel: {there} here; it runs on one device, {device}", file=sys.stderr)
        else:
            _check_batch_norm(model, devices)
            module = nn.DataParallel(model)
        in_precision = Precision(precision, device)
        optimizer = optimizer_of(model.named_parameters())
        return NativeTrainer(
            model=model,
            spread_model=WholeModel(
                module=module,
                accumulating=nullcontext,
                used=UsedAlone(),
                model=model,
                parts=Parts.of(model, layout, mesh),
                now=Now(),
                autocast=in_precision.autocast,
                host=HostMemory(device),
            ),
            optimizer=optimizer,
            schedule=schedule_of(optimizer),
            precision=in_precision,
            clip=clip,
            mesh=mesh,
            device=device,
        )


def _check_batch_norm(model: nn.Module, devices: int) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise UserError(
                f"engine data-parallel: {name} ({type(module).__name__}) would take its statistics from one device's "
                f"samples, which is another step than one process takes; layout dp{devices} would do"
            )
