"""Replicas in a rehearsal: a counterpart of DistributedDataParallel, which does not work on tensors without values.

Gradients lie in buckets of 25 MiB, the first one of 1 MiB, in the order in which backward reaches them (Li et al.,
arXiv 2006.15704, section 3.2.3); a full bucket is averaged while backward goes on.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from samestep.parallel.zero1 import Owners

_FIRST_BUCKET, _BUCKET = 2**20, 25 * 2**20  # bytes


class ValuelessReplicas(nn.Module):
    """A module whose backward averages gradients over a group in buckets."""

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup,
        owners: Owners | None,
        apart: Collection[nn.Parameter],
        bucket_mb: float | None,
    ) -> None:
        super().__init__()
        self.module = module
        self._group = group
        self._owners = owners
        self._sends = True
        alone = {id(parameter) for parameter in apart}
        trained = [p for p in module.parameters() if p.requires_grad and id(p) not in alone]
        for bucket in _buckets(trained[::-1], bucket_mb):
            self._attach(bucket)

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        return self.module(*arguments, **keywords)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context of backwards that accumulate gradients without reducing them."""
        before, self._sends = self._sends, False
        try:
            yield
        finally:
            self._sends = before

    def _attach(self, bucket: Sequence[nn.Parameter]) -> None:
        """Allocate a bucket and gradient views like DDP's reducer, so that their bytes and messages are counted."""
        sizes = [parameter.numel() for parameter in bucket]
        flat = torch.empty(sum(sizes), dtype=bucket[0].dtype, device=bucket[0].device)
        views = [view.view_as(p) for view, p in zip(flat.split(sizes), bucket, strict=True)]
        waiting = set(range(len(bucket)))
        for number, parameter in enumerate(bucket):
            parameter.register_post_accumulate_grad_hook(self._ready(bucket, flat, views, waiting, number))

    def _ready(
        self, bucket: Sequence[nn.Parameter], flat: Tensor, views: Sequence[Tensor], waiting: set[int], number: int
    ) -> Callable[[Tensor], None]:
        def ready(parameter: Tensor) -> None:
            if not self._sends:
                return
            # PyTorch's engine holds what came in until DistributedDataParallel's hook has sent the bucket.
            view, came_in = views[number], parameter.grad
            if came_in is None:
                view.zero_()
            elif came_in is not view:
                view.copy_(came_in)
            parameter.grad = view
            waiting.discard(number)
            if waiting:
                return
            waiting.update(range(len(bucket)))
            flat.div_(dist.get_world_size(self._group))
            if self._owners is None:
                dist.all_reduce(flat, group=self._group, async_op=True)
            else:
                self._owners.send(bucket, views)

        return ready


def _buckets(parameters: Sequence[nn.Parameter], bucket_mb: float | None) -> Iterator[list[nn.Parameter]]:
    """Parameters of one dtype together, up to a bucket's bytes."""
    most = _BUCKET if bucket_mb is None else int(bucket_mb * 2**20)
    for dtype in dict.fromkeys(parameter.dtype for parameter in parameters):
        limit, bucket, size = min(_FIRST_BUCKET, most), list[nn.Parameter](), 0
        for parameter in parameters:
            if parameter.dtype != dtype:
                continue
            bucket.append(parameter)
            size += parameter.numel() * parameter.element_size()
            if size >= limit:
                yield bucket
                limit, bucket, size = most, [], 0
        if bucket:
            yield bucket
