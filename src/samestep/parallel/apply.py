"""A layout applied to a module, in this order: cut, slice, recompute, compile, shard or replicate."""

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from samestep.comm.mesh import Mesh
from samestep.errors import LayoutError
from samestep.layout import Layout
from samestep.parallel.blocks import find_blocks
from samestep.parallel.cache import keep_no_cache
from samestep.parallel.host_memory import HostMemory
from samestep.parallel.moment import Now
from samestep.parallel.offload_activations import offload_activations
from samestep.parallel.offload_optimizer import offloaded_kind
from samestep.parallel.parts import Parts
from samestep.parallel.rebuild import rebuild
from samestep.parallel.recompute import recompute
from samestep.parallel.replicate import replicate
from samestep.parallel.shard import shard, without_messages
from samestep.parallel.shard_optimizer import shard_optimizer
from samestep.parallel.spread import Context, Spread, WholeModel


def spread(
    model: nn.Module,
    layout: Layout,
    mesh: Mesh,
    device: torch.device,
    *,
    precision: str,
    autocast: Context,
    example: Any = None,
) -> Spread:
    """Spread a model as its layout says. Raises LayoutError where it could not take the same step then.

    `example` is what the model may be called with (a batch's inputs, a few samples): layouts that cut the model
    itself look with it at what its forward does.
    """
    keep_no_cache(model)
    if layout.data_ranks > 1:
        _check_batch_norm(model, layout)
    host = HostMemory(device)
    common = {
        "model": model,
        "parts": Parts.of(model, layout, mesh),
        "now": Now(),
        "autocast": autocast,
        "host": host,
    }
    blocks = find_blocks(model)
    if layout.recompute != "none":
        recompute(blocks, layout.recompute)
    if layout.offloads("activations"):
        offload_activations(blocks, host)
    if layout.zero >= 2:
        grid = mesh.grid["replicate", "shard"] if layout.replicate > 1 else mesh.grid["shard"]
        shard(model, blocks, layout, grid, precision)
        assert isinstance(model, FSDPModule)
        return WholeModel(module=model, accumulating=partial(without_messages, model), **common)
    if layout.data_ranks > 1:
        replicated = replicate(model, mesh.data_group, device)
        return WholeModel(module=replicated, accumulating=replicated.no_sync, **common)
    return WholeModel(module=model, accumulating=nullcontext, **common)


def spread_optimizer(
    optimizer: Optimizer, layout: Layout, mesh: Mesh, device: torch.device, *, offload_folder: Path | None = None
) -> Optimizer:
    """Spread an optimizer as its layout says; shards of parameters bring their shards of state along."""
    kind = offloaded_kind(type(optimizer), layout, device, offload_folder)
    if layout.zero == 1:
        return shard_optimizer(optimizer, mesh.grid.get_group("shard"), kind)
    return optimizer if kind is type(optimizer) else rebuild(optimizer, kind)


def _check_batch_norm(model: nn.Module, layout: Layout) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise LayoutError(
                f'layout "{layout}": {name} ({type(module).__name__}) would take its statistics from one rank\'s '
                "samples, which is another step than one process takes; layer norm or group norm would do"
            )
