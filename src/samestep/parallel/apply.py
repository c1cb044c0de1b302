"""A layout applied to a module, in this order: cut, slice, recompute, compile, shard or replicate."""

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
from samestep.parallel.context.split import split_tokens
from samestep.parallel.moment import Now
from samestep.parallel.parts import Parts
from samestep.parallel.recompute import recompute
from samestep.parallel.replicate import replicate
from samestep.parallel.shard import shard, without_messages
from samestep.parallel.shard_optimizer import shard_optimizer
from samestep.parallel.spread import Context, Details, Spread, WholeModel
from samestep.parallel.tensor.slicing import slice_tensors
from samestep.parallel.trace import Trace, trace


def spread(
    model: nn.Module,
    layout: Layout,
    mesh: Mesh,
    device: torch.device,
    *,
    precision: str,
    autocast: Context,
    details: Details,
) -> Spread:
    """Spread a model as its layout says, and fill what of it is on the meta device with its initial values.

    Raises LayoutError where it could not take the same step then.
    """
    keep_no_cache(model)
    if layout.data_ranks > 1:
        _check_batch_norm(model, layout)
    parts = Parts.of(model, layout, mesh)
    blocks = find_blocks(model)
    looks = layout.context > 1 or layout.tensor > 1
    seen = _look(model, layout, details.example) if looks else None  # before anything is changed
    if seen is not None and layout.context > 1:
        split_tokens(model, blocks, seen, mesh, parts)
    vocabulary = None
    if seen is not None and layout.tensor > 1:
        vocabulary = slice_tensors(
            model, blocks, seen, parts, mesh, device, example=details.example, given=details.tensor_plan
        )
    if layout.recompute != "none":
        recompute(blocks, layout.recompute)
    common = {"model": model, "parts": parts, "now": Now(), "autocast": autocast, "vocabulary": vocabulary}
    if layout.zero >= 2:
        grid = mesh.grid["replicate", "shard"] if layout.replicate > 1 else mesh.grid["shard"]
        shard(model, blocks, layout, grid, precision)
        if details.initial is not None:
            details.initial.fill(model, torch.device("cpu") if layout.offload == "parameters" else device)
        assert isinstance(model, FSDPModule)
        return WholeModel(module=model, accumulating=partial(without_messages, model), **common)
    if layout.data_ranks > 1:
        replicated = replicate(model, mesh.data_group, device)
        return WholeModel(module=replicated, accumulating=replicated.no_sync, **common)
    return WholeModel(module=model, accumulating=nullcontext, **common)


def _look(model: nn.Module, layout: Layout, example: Any) -> Trace:
    if example is None:
        raise UserError(
            f'layout "{layout}" cuts the model itself, for which its forward must be followed once; '
            "session.prepare(model, optimizer, example=inputs) with the inputs of a few samples would do"
        )
    return trace(model, example)


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
