"""A layout applied to a module, in this order: cut, slice, recompute, compile, shard or replicate."""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from samestep.comm.mesh import Mesh
from samestep.errors import LayoutError, UserError
from samestep.layout import Layout
from samestep.parallel.blocks import find_blocks
from samestep.parallel.cache import keep_no_cache
from samestep.parallel.moment import Now
from samestep.parallel.parts import Parts
from samestep.parallel.pipeline.cut import Cut, cut
from samestep.parallel.pipeline.pipeline import Pipeline
from samestep.parallel.recompute import recompute
from samestep.parallel.replicate import replicate
from samestep.parallel.shard import shard, without_messages
from samestep.parallel.shard_optimizer import shard_optimizer
from samestep.parallel.spread import Context, Spread, WholeModel
from samestep.parallel.trace import trace


def spread(
    model: nn.Module,
    layout: Layout,
    mesh: Mesh,
    device: torch.device,
    *,
    precision: str,
    autocast: Context,
    example: Any = None,
    cut_at: Sequence[str] = (),
) -> Spread:
    """Spread a model as its layout says. Raises LayoutError where it could not take the same step then.

    `example` is what the model may be called with (a batch's inputs, a few samples): layouts that cut the model
    itself look with it at what its forward does. `cut_at` names the layers with which pipeline stages begin, but
    the first; without it they are found.
    """
    keep_no_cache(model)
    if layout.data_ranks * layout.pipeline > 1:
        _check_batch_norm(model, layout)
    parts = Parts.of(model, layout, mesh)
    common = {"model": model, "parts": parts, "now": Now(), "autocast": autocast}
    of_pipeline = _cut(model, layout, mesh, parts, example, cut_at) if layout.pipeline > 1 else None
    blocks = of_pipeline.blocks if of_pipeline is not None else find_blocks(model)
    if layout.recompute != "none":
        recompute(blocks, layout.recompute)
    if layout.zero >= 2:
        grid = mesh.grid["replicate", "shard"] if layout.replicate > 1 else mesh.grid["shard"]
        root = of_pipeline or model
        shard(root, blocks, layout, grid, precision)
        assert isinstance(root, FSDPModule)
        if of_pipeline is None:
            return WholeModel(module=root, accumulating=partial(without_messages, root), **common)
    if of_pipeline is not None:
        of_pipeline.end_stages()
        return Pipeline(cut=of_pipeline, layout=layout, mesh=mesh, device=device, **common)
    if layout.data_ranks > 1:
        replicated = replicate(model, mesh.data_group, device)
        return WholeModel(module=replicated, accumulating=replicated.no_sync, **common)
    return WholeModel(module=model, accumulating=nullcontext, **common)


def spread_optimizer(optimizer: Optimizer, layout: Layout, mesh: Mesh) -> Optimizer:
    """Spread an optimizer as its layout says; shards of parameters bring their shards of state along."""
    if layout.zero == 1:
        return shard_optimizer(optimizer, mesh.grid.get_group("shard"))
    return optimizer


def _cut(model: nn.Module, layout: Layout, mesh: Mesh, parts: Parts, example: Any, cut_at: Sequence[str]) -> Cut:
    if example is None:
        raise UserError(
            f'session.prepare: layout "{layout}" cuts the model, and looks at its forward for that; give an '
            "`example` too: what the model may be called with, a few samples"
        )
    return cut(model, layout, mesh, trace(model, example), parts, cut_at)


def _check_batch_norm(model: nn.Module, layout: Layout) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            of = "one micro-batch's" if layout.pipeline > 1 else "one rank's"
            raise LayoutError(
                f'layout "{layout}": {name} ({type(module).__name__}) would take its statistics from {of} '
                "samples, which is another step than one process takes; layer norm or group norm would do"
            )
