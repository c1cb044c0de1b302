"""Shards: each data rank keeps a part of every parameter, gradient and optimizer state (FSDP2).

ZeRO-3 gathers a block's parameters for its forward and again for its backward; ZeRO-2 keeps what it gathered for
the forward until the backward is done. (Rajbhandari et al. 2020, section 5; Zhao et al. 2023.)
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from samestep.comm.mesh import Mesh
from samestep.layout import Layout
from samestep.parallel.moment import Now
from samestep.parallel.shard_outputs import hide_tensors, refuse_gradients_in_forward, show_tensors
from samestep.parallel.shard_units import kept_whole


def shard(
    model: nn.Module,
    units: Sequence[nn.Module],
    layout: Layout,
    mesh: Mesh,
    precision: str,
    now: Now,
    *,
    experts: Sequence[nn.Module] = (),
) -> None:
    """Shard a model in place, unit by unit and then what is left.

    `experts`: units of which the ranks of the expert axis hold different parts, each sharded over the ranks that hold
    the same. Replicas have the same shards. What can't be sharded stays whole on every rank; its gradients are to be
    averaged by `average_gradients`.
    """
    units = [unit for unit in units if unit not in experts]
    for part in [*experts, *units, model]:
        show_tensors(part)
    # Before FSDP2 changes their classes.
    described = {id(module): f"{name} ({type(module).__name__})" for name, module in model.named_modules()}
    whole = kept_whole(model)
    mixed = MixedPrecisionPolicy()
    if precision == "bf16":
        # Half the bytes to gather; gradients are summed over ranks in float32, where bf16 would lose digits.
        mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    offload = OffloadPolicy()
    if layout.offloads_parameters:
        pinned = mesh.grid.device_type != "cpu" and not layout.offloads("parameters-disk")
        offload = CPUOffloadPolicy(pin_memory=pinned)
    of_experts = mesh.shards(of_experts=True) if mesh.size("expert") > 1 else None
    grid = mesh.shards(of_experts=False)
    for part in [*experts, *units, model]:
        fully_shard(
            part,
            mesh=of_experts if part in experts else grid,
            reshard_after_forward=layout.zero == 3,
            mp_policy=mixed,
            offload_policy=offload,
            ignored_params=whole,
        )
    for part in [*experts, *units, model]:
        part.register_forward_hook(hide_tensors)
    for unit in units:
        refuse_gradients_in_forward(unit, described[id(unit)], layout, now)
    _prefetch([unit for unit in units if isinstance(unit, FSDPModule)])


def put_back(root: nn.Module) -> None:
    """Let a model's parameters be shards again, after a forward without a backward, which would do it.

    Else gradients would be cleared, measured and saved of the whole parameters that a forward may leave in place.
    """
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _prefetch(blocks: Sequence[FSDPModule]) -> None:
    """Gather the next block's parameters while this one computes, in forward and in backward."""
    for block, following in pairwise(blocks):
        block.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([block])


@contextmanager
def without_messages(model: FSDPModule) -> Iterator[None]:
    """Forward and backward that keep their gradients on this rank."""
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)
