"""Apply a layout to an optimizer: its state is sharded, offloaded, or kept by the owners of whole parameters."""

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from samestep.comm.mesh import Mesh
from samestep.errors import LayoutError, UserError
from samestep.layout import Layout
from samestep.parallel.offload.memory import HostMemory, MappedFile
from samestep.parallel.offload.parameters import keep_state
from samestep.parallel.optimizer.joined import Joined, OptimizerMember, rebuild
from samestep.parallel.optimizer.master_weights import with_masters
from samestep.parallel.optimizer.offloaded import OffloadedOptimizer, offloaded_kind
from samestep.parallel.optimizer.whole import LocalOptimizer, WholeOptimizer
from samestep.parallel.parallel_model import ParallelModel
from samestep.parallel.zero1 import shard_joined, shard_optimizer
from samestep.torch_internals.sharded import owned_by_ranks


def spread_optimizer(
    optimizer: Optimizer,
    layout: Layout,
    mesh: Mesh,
    device: torch.device,
    *,
    spread_model: ParallelModel,
    offload_folder: Path | None = None,
    master_dtype: torch.dtype | None = None,
) -> Optimizer:
    """Spread an optimizer as its layout says; shards of parameters bring their shards of state along.

    `master_dtype`: of the copies that it steps in place of the parameters; None: it steps these themselves.
    Raises UserError where it can't take the same step under this layout.

    Which way for which layout, with the optimizer as the user made it for whole parameters:

        plain replicas            itself, on every rank alike
        zero1                     ZeroRedundancyOptimizer: each rank of the shard group steps its part
        zero2, fsdp               itself: its parameters are DTensors by now, and its state becomes shards
        offload=optimizer...      a copy on the CPU steps (`OffloadedOptimizer`), also within each of the above
        not elementwise           `WholeOptimizer`, if ranks hold parts: owners gather, step and scatter
    """
    if isinstance(optimizer, Joined):
        assert master_dtype is None  # `engines.checks` refuses several optimizers and those by name with copies
        joined = optimizer.each(partial(_of_member, layout, mesh, device, spread_model, offload_folder))
        # Every rank asks, in the same order: under ZeRO-1 the answer is exchanged between the ranks of the shard
        # group.
        spread_model.parts.find_owners(spread_model.model, lambda position: list(_stepped_by(joined, mesh, position)))
        return joined
    kind = offloaded_kind(type(optimizer), layout, device, offload_folder)
    if master_dtype is not None:
        kind = with_masters(kind, master_dtype)
    if layout.zero == 1:
        sharded: Any = shard_optimizer(optimizer, mesh.grid.get_group("shard"), kind, spread_model.late)
        spread_model.parts.find_owners(spread_model.model, lambda position: owned_by_ranks(sharded)[position])
        return sharded
    if spread_model.disk is not None:
        keep_state(optimizer, spread_model.disk)
    return optimizer if kind is type(optimizer) else rebuild(optimizer, kind)


def _in_groups(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    """All parameters of an optimizer, in the order of its groups."""
    for group in optimizer.param_groups:
        yield from group["params"]


def _stepped_by(joined: Joined, mesh: Mesh, position: int) -> Iterator[nn.Parameter]:
    """The parameters that a position of the shard axis steps under ZeRO-1; every rank asks."""
    for optimizer in joined.optimizers():
        if isinstance(optimizer, WholeOptimizer):
            yield from optimizer.stepped_along(position, mesh)
        elif hasattr(optimizer, "optim"):
            yield from owned_by_ranks(optimizer)[position]
        else:
            yield from _in_groups(optimizer)


def _of_member(
    layout: Layout,
    mesh: Mesh,
    device: torch.device,
    spread_model: ParallelModel,
    folder: Path | None,
    member: OptimizerMember,
) -> Optimizer | None:
    """Apply the layout to one of several optimizers; None if this rank steps none of its parameters."""
    kind = member.kind(layout)
    cut = layout.zero >= 2 or layout.tensor > 1 or layout.expert > 1
    if not kind.by_number and cut:
        return _whole(layout, spread_model, member)
    optimizer = member.optimizer
    if optimizer is None:
        return None
    make = member.make
    if layout.offloads("optimizer") or layout.offloads("optimizer-disk"):
        memory = HostMemory(device) if layout.offloads("optimizer") else MappedFile(folder)
        make = partial(_offloaded, member, memory)
    if layout.zero == 1:
        return shard_joined(optimizer, mesh.grid.get_group("shard"), make, spread_model.late)
    if make is not member.make:
        groups = optimizer.param_groups
        made = make(groups)
        for own_group, original in zip(
            made.param_groups, groups, strict=True
        ):  # a schedule refers to the given groups
            original.update({name: value for name, value in own_group.items() if name != "params"})
        made.param_groups = groups
        return made
    if spread_model.disk is not None:
        keep_state(optimizer, spread_model.disk)
    elif any(isinstance(parameter, DTensor) for parameter in _in_groups(optimizer)):
        return LocalOptimizer(optimizer, member.make)
    return optimizer


def _offloaded(member: OptimizerMember, memory: HostMemory | MappedFile, groups: Any) -> OffloadedOptimizer:
    return OffloadedOptimizer(groups, kind=lambda inner, **_: member.make(inner), memory=memory, by_number=True)


def _whole(layout: Layout, spread_model: ParallelModel, member: OptimizerMember) -> WholeOptimizer:
    """Make a `WholeOptimizer`. Raises LayoutError for offload to disk."""
    parts = spread_model.parts
    for option in ("optimizer-disk", "parameters-disk"):
        if layout.offloads(option):
            raise LayoutError(
                f'layout "{layout}": {member.title} looks at whole parameters, which their owners keep in memory; '
                f"use offload={option.removesuffix('-disk')}"
            )
    names: Mapping[Tensor, str] = {parameter: name for name, parameter in spread_model.model.named_parameters()}
    host = layout.offloads("optimizer") or layout.offloads_parameters
    return WholeOptimizer(member.optimizer, member.make, names=names, parts=parts, host=host)


def check_by_number(optimizer: Optimizer, layout: Layout, why: str) -> None:
    """Raise UserError for an optimizer that isn't elementwise, for ranks that step rows of parameters."""
    for member in optimizer.members if isinstance(optimizer, Joined) else ():
        if not member.kind(layout).by_number:
            raise UserError(f"{why}, and {member.title} looks at whole parameters")
