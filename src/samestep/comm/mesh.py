"""Mesh: the ranks of a layout as a grid, and the process group of each dimension."""

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from samestep.data.order import Place
from samestep.layout import MESH_DIMENSIONS, Layout


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """The grid of a layout's ranks, and this rank's groups in it."""

    grid: DeviceMesh  # [pipeline, replicate, shard, context, tensor]
    data_group: dist.ProcessGroup  # ranks that see other samples than this one, and itself
    data_place: Place  # which slice of a global batch this rank takes


def build_mesh(layout: Layout, device_type: str) -> Mesh:
    """Make the grid of the ranks of the process group, which must be as many as the layout's size."""
    grid = init_device_mesh(device_type, layout.mesh_shape(), mesh_dim_names=MESH_DIMENSIONS)
    data = grid["replicate", "shard"]._flatten("data")
    return Mesh(
        grid=grid,
        data_group=data.get_group(),
        data_place=Place(index=data.get_local_rank(), of=data.size()),
    )
