"""Wire: the collectives that a method uses over one process group, and the bytes that this rank sends by them."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.torch_internals import foreach

# The weight of a rank without samples, instead of 0, so that the mean is defined if no rank has samples.
_NO_WEIGHT = 1e-20


class Wire:
    """Collectives over a group. `sent` counts as `samestep.comm.traffic.Traffic` does: by ring algorithms."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.ranks = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self.sent = 0.0  # bytes of this rank since the start

    def sum(self, message: Tensor, *, asynchronous: bool = False) -> dist.Work | None:
        """All-reduce a tensor in place by sum; `asynchronous`: returns the work to wait for."""
        self.sent += 2 * message.nbytes * (self.ranks - 1) / self.ranks
        return dist.all_reduce(message, group=self.group, async_op=asynchronous)

    def largest(self, message: Tensor) -> None:
        """All-reduce a tensor in place by maximum."""
        self.sent += 2 * message.nbytes * (self.ranks - 1) / self.ranks
        dist.all_reduce(message, dist.ReduceOp.MAX, group=self.group)

    def exchange(self, parts: Tensor) -> Tensor:
        """All-to-all: send row i of [ranks, ...] to rank i; returns the received rows in the same shape."""
        return self.start_exchange(parts)[0]

    def start_exchange(self, parts: Tensor, *, asynchronous: bool = False) -> tuple[Tensor, dist.Work | None]:
        """Start `exchange`. Returns the received rows, and with `asynchronous` the work to wait for first."""
        parts = parts.contiguous()
        received = torch.empty_like(parts)
        self.sent += parts.nbytes * (self.ranks - 1) / self.ranks
        return received, dist.all_to_all_single(received, parts, group=self.group, async_op=asynchronous)

    def gather(self, message: Tensor, *, counted: bool = True) -> Tensor:
        """All-gather tensors of one shape into [ranks, ...]; `counted`: add the bytes to `sent`."""
        gathered = torch.empty((self.ranks, *message.shape), dtype=message.dtype, device=message.device)
        self.sent += (self.ranks - 1) * message.nbytes * counted
        dist.all_gather(list(gathered.unbind()), message.contiguous(), group=self.group)
        return gathered

    def mean(self, tensors: Sequence[Tensor]) -> None:
        """Average tensors over the ranks in place, in one all-reduce for each dtype."""
        for some in _by_dtype(tensors):
            message = flat(some)
            self.sum(message)
            put_back(message.div_(self.ranks), some)


def at_least(weight: float) -> float:
    """A rank's weight, replaced by a tiny positive one if it is 0."""
    return max(weight, _NO_WEIGHT)


class WeightedMean:
    """Weighted mean of the ranks' tensors, in one all-reduce; `asynchronous`: only `wait` waits for it."""

    def __init__(self, wire: Wire, tensors: Sequence[Tensor], weight: float, *, asynchronous: bool = False) -> None:
        """`weight`: this rank's, 0 or more, such as the number of its loss terms; sent as one more element."""
        self._shapes = [tensor.shape for tensor in tensors]
        weight = at_least(weight)
        values = flat(tensors)
        self._message = torch.cat([values.mul_(weight), values.new_tensor([weight])])
        self._work = wire.sum(self._message, asynchronous=asynchronous)

    def wait(self) -> Tensor:
        """The mean as one flat tensor; the same bits on every rank."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._message[:-1] / self._message[-1]


def _by_dtype(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    kinds: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault(tensor.dtype, []).append(tensor)
    return list(kinds.values())


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """A copy of all numbers of some tensors of one dtype, one after the other."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def split_like(values: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Views of a flat tensor in the shapes of some tensors."""
    parts = values.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def put_back(values: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy a flat tensor into some tensors."""
    foreach.copy_(list(tensors), split_like(values, tensors))
