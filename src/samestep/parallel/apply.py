"""A layout applied to a module, in this order: cut, slice, recompute, compile, shard or replicate."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from samestep.comm.mesh import Mesh
from samestep.errors import LayoutError
from samestep.layout import Layout
from samestep.parallel.blocks import find_blocks
from samestep.parallel.initial import InitialValues
from samestep.parallel.recompute import recompute
from samestep.parallel.replicate import replicate
from samestep.parallel.shard import shard, without_messages
from samestep.parallel.shard_optimizer import shard_optimizer


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A module spread over ranks."""

    module: nn.Module  # what forward calls
    accumulating: Callable[[], AbstractContextManager[None]]  # forward and backward without messages


def spread(
    model: nn.Module,
    layout: Layout,
    mesh: Mesh,
    device: torch.device,
    precision: str,
    initial: InitialValues | None = None,
) -> Spread:
    """Spread a model as its layout says, and fill what of it is on the meta device with its initial values.

    Raises LayoutError where it could not take the same step then.
    """
    if layout.data_ranks > 1:
        _check_batch_norm(model, layout)
    blocks = find_blocks(model)
    if layout.recompute != "none":
        recompute(blocks, layout.recompute)
    if layout.zero >= 2:
        grid = mesh.grid["replicate", "shard"] if layout.replicate > 1 else mesh.grid["shard"]
        shard(model, blocks, layout, grid, precision)
        if initial is not None:
            initial.fill(model, torch.device("cpu") if layout.offload == "parameters" else device)
        assert isinstance(model, FSDPModule)
        return Spread(module=model, accumulating=partial(without_messages, model))
    if layout.data_ranks > 1:
        replicated = replicate(model, mesh.data_group, device)
        return Spread(module=replicated, accumulating=replicated.no_sync)
    return Spread(module=model, accumulating=nullcontext)


def spread_optimizer(optimizer: Optimizer, layout: Layout, mesh: Mesh) -> Optimizer:
    """Spread an optimizer as its layout says; shards of parameters bring their shards of state along."""
    if layout.zero == 1:
        return shard_optimizer(optimizer, mesh.grid.get_group("shard"))
    return optimizer


def _check_batch_norm(model: nn.Module, layout: Layout) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise LayoutError(
                f'layout "{layout}": {name} ({type(module).__name__}) would take its statistics from one rank\'s '
                "samples, which is another step than one process takes; layer norm or group norm would do"
            )
