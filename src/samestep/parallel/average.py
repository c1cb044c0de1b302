"""Average: gradients averaged over the data ranks in a few large messages, after backward is done."""

from collections.abc import Iterable, Iterator

import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from samestep.parallel.parts import sum_gradients_over

_BUCKET_BYTES = 25 * 2**20  # what DistributedDataParallel sends at once


def average_gradients(parameters: Iterable[nn.Parameter], group: ProcessGroup, device_type: str) -> None:
    """Average gradients over a group in place; a parameter that no rank used keeps none."""
    ranks = dist.get_world_size(group)
    for bucket in _buckets(parameters):
        sum_gradients_over(group, bucket, device_type)
        for parameter in bucket:
            if parameter.grad is not None:
                parameter.grad.div_(ranks)


def _buckets(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    bucket: list[nn.Parameter] = []
    size = 0
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        bucket.append(parameter)
        size += parameter.numel() * parameter.element_size()
        if size >= _BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket
