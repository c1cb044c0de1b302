"""Mesh: the ranks of a layout as a grid, and the process group of each axis."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from samestep.data.order import DataPlace
from samestep.layout import MESH_AXES, Layout
from samestep.torch_internals.groups import flattened


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """The grid of a layout's ranks, and this rank's groups in it."""

    grid: DeviceMesh  # [pipeline, replicate, shard, expert, context, tensor]
    data_group: dist.ProcessGroup  # ranks that see other samples than this one, and itself
    data_place: DataPlace  # which slice of a global batch this rank takes
    loss_group: dist.ProcessGroup  # ranks whose losses add up: of all samples, and of all pipeline stages

    def size(self, axis: str) -> int:
        return self.grid.size(MESH_AXES.index(axis))

    def coordinate(self, axis: str) -> int:
        """This rank's position in an axis."""
        return self.grid.get_local_rank(axis)

    def group(self, *axes: str) -> dist.ProcessGroup:
        """The group of the ranks that differ from this one along these axes only; a collective."""
        split = [name for name in MESH_AXES if name in axes and self.size(name) > 1]
        if len(split) < 2:
            return self.grid.get_group(split[0] if split else axes[0])
        return flattened(self.grid[tuple(split)], "+".join(split)).get_group()

    def shards(self, *, of_experts: bool) -> DeviceMesh:
        """The grid over whose last axis parameters are sharded, [replicate, shard] or [shard]; a collective.

        Experts are sharded over the ranks that hold the same ones; other parameters also over the expert axis, along
        which all ranks hold them.
        """
        last = "shard"
        if self.size("expert") > 1 and not of_experts:
            last = "shard+expert"
            flattened(self.grid["shard", "expert"], last)
        with warnings.catch_warnings():  # PyTorch warns that a flattened axis should be sliced from another mesh
            warnings.simplefilter("ignore")
            return self.grid["replicate", last] if self.size("replicate") > 1 else self.grid[last]

    def ranks(self, axis: str) -> list[int]:
        """The global ranks of this rank's line along an axis, in the order of their positions."""
        return dist.get_process_group_ranks(self.group(axis))


def build_mesh(layout: Layout, device_type: str) -> Mesh:
    """Make the grid of all ranks, whose number must be the layout's size."""
    grid = DeviceMesh(device_type, rank_grid(layout), mesh_dim_names=MESH_AXES)
    # Ranks along these three axes have different samples: gradients are averaged over the product of their sizes.
    data = flattened(grid["replicate", "shard", "expert"], "data")
    return Mesh(
        grid=grid,
        data_group=data.get_group(),
        data_place=DataPlace(index=data.get_local_rank(), of=data.size()),
        # It includes the pipeline axis, since only last stages have a loss (the other ranks add zeros), but neither
        # the context nor the tensor axis, whose ranks all have the same loss.
        loss_group=flattened(grid["pipeline", "replicate", "shard", "expert"], "loss").get_group(),
    )


def new_group(ranks: Sequence[int], backend: str | None = None) -> dist.ProcessGroup:
    """A process group of some ranks. Every rank of the world must make it, in the same order of groups.

    A rank that is no member gets a mark that it can't use. Without a back end it has that of all ranks.
    """
    group: Any = dist.new_group(list(ranks), backend=backend)
    return group


def rank_grid(layout: Layout) -> torch.Tensor:
    """The number of the rank at each position of the mesh; ranks are numbered along the layout's order of axes."""
    order: Sequence[str] = layout.placement
    sizes = [getattr(layout, name) for name in order]
    # The axes of the result are those of MESH_AXES.
    return torch.arange(layout.size).reshape(sizes).permute([order.index(name) for name in MESH_AXES])
