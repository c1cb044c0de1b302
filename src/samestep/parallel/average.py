"""Average: gradients averaged over the data ranks in a few large messages, after backward is done."""

from collections.abc import Iterable

import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from samestep.parallel.buckets import buckets
from samestep.parallel.parts import Parts, sum_gradients_over


def average_gradients(parameters: Iterable[nn.Parameter], group: ProcessGroup, device_type: str) -> None:
    """Average gradients over a group in place; a parameter that no rank used keeps none."""
    ranks = dist.get_world_size(group)
    for bucket in buckets(parameters):
        sum_gradients_over(group, bucket, device_type)
        for parameter in bucket:
            if parameter.grad is not None:
                parameter.grad.div_(ranks)


def average_what_is_whole(model: nn.Module, parts: Parts) -> None:
    """Average the gradients of what a sharded model keeps whole on every rank, such as scalars."""
    average_gradients(
        (p for p in parts.not_of_experts(model) if not isinstance(p, DTensor)),
        parts.mesh.data_group,
        parts.mesh.grid.device_type,
    )


def average_experts(model: nn.Module, parts: Parts) -> None:
    """Average the gradients of experts over the data ranks, after backward is done.

    A rank's experts have worked on the tokens of all ranks along the expert axis, so their gradients are sums over
    these already; what is left is the sum over the ranks that hold the same experts.
    """
    mesh = parts.mesh
    if mesh.size("expert") == 1:
        return
    experts = [p for name, p in model.named_parameters() if parts.part(name).of_experts]
    whole = [p for p in experts if not isinstance(p, DTensor)]
    for bucket in buckets(whole):
        if mesh.size("replicate") * mesh.size("shard") > 1:
            sum_gradients_over(mesh.group("replicate", "shard"), bucket, mesh.grid.device_type)
    for parameter in experts:
        if parameter.grad is not None:
            sharded = isinstance(parameter, DTensor)  # and averaged over the ranks with the same experts by that
            parameter.grad.div_(mesh.size("expert") if sharded else mesh.data_place.of)
