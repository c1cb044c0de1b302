"""Replicas: every data rank holds the whole model, and gradients are averaged while backward still runs."""

import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from samestep.parallel.owners import Owners, to_owners
from samestep.parallel.used import Used, UsedAlone


@dataclass(frozen=True, kw_only=True)
class GradientExchange:
    """What replicas do with their gradients where that is not to average them as they are."""

    # A communication hook of DistributedDataParallel, with its first argument.
    hook: tuple[Any, Callable[..., Any]] | None = None
    # Without a hook gradients stay each rank's own; this then notes which parameters a step used.
    used: Callable[[nn.Module], Used] = lambda model: UsedAlone()


def replicate(
    module: nn.Module,
    group: ProcessGroup,
    device: torch.device,
    owners: Owners | None = None,
    exchange: GradientExchange | None = None,
    apart: Collection[nn.Parameter] = (),
    bucket_mb: float | None = None,
) -> DistributedDataParallel:
    """Wrap a module so that backward averages its gradients over `group`, or on the ranks that own them.

    `apart`: parameters whose gradients it leaves alone. `bucket_mb`: megabytes (1,048,576 bytes) of gradients that
    are sent together; None: as PyTorch has it.
    """
    every_name = module.named_parameters(remove_duplicate=False)
    alone = {id(parameter) for parameter in apart}
    ignored = [name for name, parameter in every_name if id(parameter) in alone]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ignored)
    try:
        replicated = DistributedDataParallel(
            module,
            device_ids=None if device.type == "cpu" else [device.index],
            process_group=group,
            gradient_as_bucket_view=True,
            bucket_cap_mb=bucket_mb,  # pyright: ignore[reportArgumentType]  # a fraction is taken as well
            **_no_buffer_messages(),
        )
    finally:  # it is looked at only here, and the module may be wrapped again
        del module._ddp_params_and_buffers_to_ignore
    if owners is not None:
        replicated.register_comm_hook(owners, to_owners)
    elif exchange is not None and exchange.hook is not None:
        replicated.register_comm_hook(*exchange.hook)
    return replicated


def _no_buffer_messages() -> dict[str, Any]:
    """Every rank computes the same buffers, so none is sent before a forward. PyTorch 2.13 renamed the option."""
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False}
