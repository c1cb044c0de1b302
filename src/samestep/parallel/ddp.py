"""Replicas: every data rank holds the whole model, and gradients are averaged over the data ranks.

By DistributedDataParallel while backward runs, or in a few large buckets after it.

An average over data ranks is not yet the mean over samples: ranks may have unlike numbers of samples. Each rank's
loss is a sum, scaled by (data ranks / samples of the global batch) before backward, so that the average over ranks of
these gradients is the sum over all samples / their number (`NativeTrainer.gradient_scale`). What is averaged here may
hence be averaged without looking at counts.
"""

import inspect
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from samestep.comm.shared_memory.process_group import KernelGroup, SharedMemoryGroup
from samestep.parallel.sharding import ShardTable, sum_gradients_over
from samestep.parallel.unused_parameters import UnusedParameters, UnusedParametersAlone
from samestep.parallel.valueless import has_values
from samestep.parallel.valueless_replicas import ValuelessReplicas
from samestep.parallel.zero1 import Owners, to_owners
from samestep.torch_internals import foreach
from samestep.torch_internals.sharded import left_out_of_ddp


@dataclass(frozen=True, kw_only=True)
class GradientExchange:
    """A replacement for the plain averaging of gradients between replicas."""

    # A communication hook of DistributedDataParallel, with its first argument.
    hook: tuple[Any, Callable[..., Any]] | None = None
    # Without a hook gradients are not exchanged by DDP; this then tracks the parameters that a step used.
    used: Callable[[nn.Module], UnusedParameters] = lambda model: UnusedParametersAlone()


def replicate(
    module: nn.Module,
    group: ProcessGroup,
    device: torch.device,
    owners: Owners | None = None,
    exchange: GradientExchange | None = None,
    apart: Collection[nn.Parameter] = (),
    bucket_mb: float | None = None,
) -> DistributedDataParallel | ValuelessReplicas:
    """Wrap a module so that backward averages its gradients over `group`, or on the ranks that own them.

    `apart`: parameters whose gradients it leaves alone. `bucket_mb`: MiB of gradients that are sent
    together; None: PyTorch's 25, and fewer where plain averages go through one stream a host.
    """
    # A rehearsal on the meta device: the same messages are counted, and none is sent.
    if not all(map(has_values, module.parameters())):
        return ValuelessReplicas(module, group, owners, apart, bucket_mb)
    every_name = module.named_parameters(remove_duplicate=False)
    alone = {id(parameter) for parameter in apart}
    ignored = [name for name, parameter in every_name if id(parameter) in alone]
    if bucket_mb is None and owners is None and (exchange is None or exchange.hook is None):
        bucket_mb = _bucket_mb(module, alone, group)
    with left_out_of_ddp(module, ignored):
        replicated = DistributedDataParallel(
            module,
            device_ids=None if device.type == "cpu" else [device.index],
            process_group=group,
            # Gradients are views of the buckets: one copy of them less in memory, and none between bucket and
            # `.grad`.
            gradient_as_bucket_view=True,
            bucket_cap_mb=bucket_mb,  # pyright: ignore[reportArgumentType]  # a fraction is taken as well
            **_no_buffer_messages(),
        )
    # Read from now on by the compiler alone, which refuses one below PyTorch's first bucket, and would break the
    # graphs of compiled blocks where a bucket ends.
    replicated.bucket_bytes_cap = max(replicated.bucket_bytes_cap, int(_PYTORCHS_DEFAULT * 2**20))
    if owners is not None:
        # A hook takes the place of DDP's own all-reduce for every bucket.
        replicated.register_comm_hook(owners, to_owners)
    elif exchange is not None and exchange.hook is not None:
        replicated.register_comm_hook(*exchange.hook)
    return replicated


# MiB of a bucket between hosts. Over a link of 1 Gbit/s 0.5 MiB takes 4 ms, ten times a message's latency.
_LEAST_BETWEEN_HOSTS, _PYTORCHS_DEFAULT = 0.5, 25.0
_BUCKETS_BETWEEN_HOSTS = 8


def _bucket_mb(module: nn.Module, apart: Collection[int], group: ProcessGroup) -> float | None:
    """The size of buckets where the user gave none; None: as PyTorch has it.

    Between hosts a link is busy for much of the step while the processors compute, so gradients are sent in about
    eight buckets: the last one, which backward doesn't overlap, is then small. Within a host, where the processors
    copy the messages themselves, more buckets gain nothing.
    """
    if not isinstance(group, KernelGroup) or isinstance(group, SharedMemoryGroup):
        return None
    size = sum(p.nbytes for p in module.parameters() if p.requires_grad and id(p) not in apart) / 2**20
    return min(_PYTORCHS_DEFAULT, max(_LEAST_BETWEEN_HOSTS, size / _BUCKETS_BETWEEN_HOSTS))


def _no_buffer_messages() -> dict[str, Any]:
    """Disable DDP's broadcast of buffers, which are the same on every rank. PyTorch 2.13 renamed the option."""
    parameters = inspect.signature(DistributedDataParallel.__init__).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in parameters else "broadcast_buffers": False}


def average_gradients(parameters: Iterable[nn.Parameter], group: ProcessGroup, device_type: str) -> None:
    """Average gradients over a group in place; parameters that no rank used keep `grad=None`."""
    averaged = list(parameters)
    sum_gradients_over(group, averaged, device_type)
    _divide([p.grad for p in averaged if p.requires_grad and p.grad is not None], dist.get_world_size(group))


def _divide(gradients: Sequence[Tensor], by: int) -> None:
    if gradients:
        foreach.div_(list(gradients), by)


def average_what_is_whole(model: nn.Module, parts: ShardTable) -> None:
    """Average the gradients of a sharded model's unsharded parameters, such as scalars."""
    average_gradients(
        (p for p in parts.not_of_experts(model) if not isinstance(p, DTensor)),
        parts.mesh.data_group,
        parts.mesh.grid.device_type,
    )


def average_experts(model: nn.Module, parts: ShardTable) -> None:
    """Average the gradients of experts over the data ranks, after backward is done.

    A rank's experts have worked on the tokens of all ranks along the expert axis, so their gradients are sums over
    these already; what is left is the sum over the ranks that hold the same experts.
    """
    mesh = parts.mesh
    if mesh.size("expert") == 1:
        return
    experts = [p for name, p in model.named_parameters() if parts.part(name).of_experts]
    # Shards of experts were summed by FSDP2's reduce-scatter over exactly this group.
    whole = [p for p in experts if not isinstance(p, DTensor)]
    if mesh.size("replicate") * mesh.size("shard") > 1:
        sum_gradients_over(mesh.group("replicate", "shard"), whole, mesh.grid.device_type)
    for parameter in experts:
        if parameter.grad is not None:
            sharded = isinstance(parameter, DTensor)  # and averaged over the ranks with the same experts by that
            # FSDP2 has already divided shards by the ranks with the same experts, so the size of the expert axis is
            # left. Sums of unsharded experts are divided by the number of all data ranks.
            parameter.grad.div_(mesh.size("expert") if sharded else mesh.data_place.of)
