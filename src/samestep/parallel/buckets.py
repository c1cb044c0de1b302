"""Buckets: parameters in the lots in which their gradients are sent."""

from collections.abc import Iterable, Iterator

from torch import nn

_BUCKET_BYTES = 25 * 2**20  # what DistributedDataParallel sends at once


def buckets(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """The parameters that are trained, in lots of about as many bytes as make a good message."""
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
