"""Average: gradients averaged over the data ranks in a few large messages, after backward is done."""

from collections.abc import Iterable

import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from samestep.parallel.buckets import buckets
from samestep.parallel.parts import sum_gradients_over


def average_gradients(parameters: Iterable[nn.Parameter], group: ProcessGroup, device_type: str) -> None:
    """Average gradients over a group in place; a parameter that no rank used keeps none."""
    ranks = dist.get_world_size(group)
    for bucket in buckets(parameters):
        sum_gradients_over(group, bucket, device_type)
        for parameter in bucket:
            if parameter.grad is not None:
                parameter.grad.div_(ranks)


def average_what_is_whole(model: nn.Module, group: ProcessGroup, device_type: str) -> None:
    """Average the gradients of what a sharded model keeps whole on every rank, such as scalars."""
    average_gradients((p for p in model.parameters() if not isinstance(p, DTensor)), group, device_type)
