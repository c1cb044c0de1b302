"""Replicas: every data rank holds the whole model, and gradients are averaged while backward still runs."""

import inspect
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from samestep.parallel.owners import Owners, to_owners


def replicate(
    module: nn.Module, group: ProcessGroup, device: torch.device, owners: Owners | None = None
) -> DistributedDataParallel:
    """Wrap a module so that backward averages its gradients over `group`, or on the ranks that own them."""
    replicated = DistributedDataParallel(
        module,
        device_ids=None if device.type == "cpu" else [device.index],
        process_group=group,
        gradient_as_bucket_view=True,
        **_no_buffer_messages(),
    )
    if owners is not None:
        replicated.register_comm_hook(owners, to_owners)
    return replicated


def _no_buffer_messages() -> dict[str, Any]:
    """Every rank computes the same buffers, so none is sent before a forward. PyTorch 2.13 renamed the option."""
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False}
