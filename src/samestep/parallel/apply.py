"""A layout applied to a module, in this order: cut, slice, recompute, compile, shard or replicate."""

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from samestep.comm.mesh import Mesh
from samestep.layout import Layout
from samestep.parallel.batch_norm import global_batch_norm
from samestep.parallel.blocks import find_blocks
from samestep.parallel.cache import keep_no_cache
from samestep.parallel.dropout import same_dropout
from samestep.parallel.moment import Now
from samestep.parallel.parts import Parts
from samestep.parallel.recompute import recompute
from samestep.parallel.replicate import replicate
from samestep.parallel.shard import shard, without_messages
from samestep.parallel.shard_optimizer import shard_optimizer
from samestep.parallel.spread import Context, Spread, WholeModel
from samestep.parallel.used import UsedAlone, UsedByReplicas, UsedByShards


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
    now = Now()
    same_dropout(model, now)
    global_batch_norm(model, mesh.data_group, now)
    common = {"model": model, "parts": Parts.of(model, layout, mesh), "now": now, "autocast": autocast}
    blocks = find_blocks(model)
    if layout.recompute != "none":
        recompute(blocks, layout.recompute, now)
    if layout.zero >= 2:
        grid = mesh.grid["replicate", "shard"] if layout.replicate > 1 else mesh.grid["shard"]
        shard(model, blocks, layout, grid, precision)
        assert isinstance(model, FSDPModule)
        used = UsedByShards(model, mesh.data_group)
        return WholeModel(module=model, accumulating=partial(without_messages, model), used=used, **common)
    if layout.data_ranks > 1:
        replicated = replicate(model, mesh.data_group, device)
        used = UsedByReplicas(model, mesh.data_group)
        return WholeModel(module=replicated, accumulating=replicated.no_sync, used=used, **common)
    return WholeModel(module=model, accumulating=nullcontext, used=UsedAlone(), **common)


def spread_optimizer(optimizer: Optimizer, layout: Layout, mesh: Mesh) -> Optimizer:
    """Spread an optimizer as its layout says; shards of parameters bring their shards of state along."""
    if layout.zero == 1:
        return shard_optimizer(optimizer, mesh.grid.get_group("shard"))
    return optimizer
