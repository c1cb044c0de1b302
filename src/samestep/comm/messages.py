"""Messages of one tensor: all-gather and reduce-scatter of parts, and the largest of flags and small numbers.

A back end such as NCCL sends a list of tensors through a buffer of its own, which it fills and empties by copies. So
a message is one tensor here, not a list of them, and is copied no oftener.

Shapes, for n ranks and parts [..., length r of rank r, ...] along `dim`: all-gather gives [..., sum of the lengths,
...]; reduce-scatter takes that and gives [..., own length, ...]. Messages go along dimension 0, so that each rank's
part is one piece of memory; parts of unlike lengths are padded to the longest with zeros, which are cut off again.

Flags and small numbers are for the ranks' hosts to act on, and no host waits for an accelerator. A few integers cost
what a wait costs: they go along with other messages where that can be.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.torch_internals.groups import serves

# The names since PyTorch 2.13, and those before.
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather(part: Tensor, group: dist.ProcessGroup, dim: int = 0) -> Tensor:
    """The parts of all ranks, of one shape, joined along a dimension; never a view of another tensor."""
    ranks = dist.get_world_size(group)
    whole = part.new_empty(ranks * part.shape[0], *part.shape[1:])
    ALL_GATHER(whole, part.contiguous(), group=group)
    if dim % part.ndim == 0 or ranks == 1:
        return whole
    dim %= part.ndim
    # [ranks * rows, ...] -> [ranks, rows, ...] -> ranks next to `dim` -> joined there: one copy.
    return whole.view(ranks, *part.shape).movedim(0, dim).flatten(dim, dim + 1)


def all_gather_uneven(part: Tensor, group: dist.ProcessGroup, lengths: Sequence[int], dim: int) -> Tensor:
    """`all_gather` for parts of unequal lengths; `lengths`: each rank's length along `dim`."""
    longest = max(lengths)
    whole = all_gather(padded(part, longest, dim), group, dim)
    if all(length == longest for length in lengths):
        return whole
    parts = whole.split(longest, dim)
    return torch.cat([part.narrow(dim, 0, length) for part, length in zip(parts, lengths, strict=True)], dim)


def reduce_scatter_uneven(whole: Tensor, group: dist.ProcessGroup, lengths: Sequence[int], dim: int) -> Tensor:
    """This rank's part of the sum over the ranks; `lengths` of the parts along the dimension."""
    longest = max(lengths)
    # [ranks, ..., longest, ...]: row r is for rank r.
    message = torch.stack([padded(part, longest, dim) for part in whole.split(list(lengths), dim)])
    summed = torch.empty_like(message[0])
    REDUCE_SCATTER(summed, message.flatten(0, 1), group=group)
    own_length = lengths[dist.get_rank(group)]
    return summed if own_length == longest else summed.narrow(dim, 0, own_length).contiguous()


def padded(part: Tensor, length: int, dim: int) -> Tensor:
    """Pad a tensor with zeros to a length, as every rank's part of a message must have the same size."""
    missing = length - part.shape[dim]
    if missing:
        shape = list(part.shape)
        shape[dim] = missing
        part = torch.cat([part, part.new_zeros(shape)], dim)
    return part.contiguous()


def host_of(group: dist.ProcessGroup, device_type: str) -> torch.device:
    """The device for messages that the host reads: the CPU if the group has a CPU back end.

    Reading a result on an accelerator would make the host wait for all work that was queued on the device before.
    """
    cpu = torch.device("cpu")
    return cpu if serves(group, cpu) else torch.device(device_type)


def largest(values: Sequence[int], group: dist.ProcessGroup, device_type: str) -> list[int]:
    """The maximum over the ranks of each value; every rank must ask, with the same number of values."""
    # MAX answers "does any rank ...?" for flags, and "do all say the same?" for a number and its negative: they do
    # where the two largest are each other's negatives.
    message = torch.tensor(values, dtype=torch.int64, device=host_of(group, device_type))
    dist.all_reduce(message, dist.ReduceOp.MAX, group=group)
    return message.tolist()
