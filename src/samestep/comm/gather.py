"""All-gather and reduce-scatter of one tensor: a message is one tensor, not a list of them, and is copied no oftener.

A back end such as NCCL sends a list of tensors through a buffer of its own, which it fills and empties by copies.

Shapes, for n ranks and parts [..., length r of rank r, ...] along `dim`: all-gather gives [..., sum of the lengths,
...]; reduce-scatter takes that and gives [..., own length, ...]. Messages go along dimension 0, so that each rank's
part is one piece of memory; parts of unlike lengths are padded to the longest with zeros, which are cut off again.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

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
    """The same of parts that have `lengths` along the dimension, a length for each rank."""
    longest = max(lengths)
    whole = all_gather(padded(part, longest, dim), group, dim)
    if all(length == longest for length in lengths):
        return whole
    parts = whole.split(longest, dim)
    return torch.cat([each.narrow(dim, 0, length) for each, length in zip(parts, lengths, strict=True)], dim)


def reduce_scatter_uneven(whole: Tensor, group: dist.ProcessGroup, lengths: Sequence[int], dim: int) -> Tensor:
    """This rank's part of the sum over the ranks; `lengths` of the parts along the dimension."""
    longest = max(lengths)
    # [ranks, ..., longest, ...]: row r is for rank r.
    message = torch.stack([padded(part, longest, dim) for part in whole.split(list(lengths), dim)])
    summed = torch.empty_like(message[0])
    REDUCE_SCATTER(summed, message.flatten(0, 1), group=group)
    mine = lengths[dist.get_rank(group)]
    return summed if mine == longest else summed.narrow(dim, 0, mine).contiguous()


def padded(part: Tensor, length: int, dim: int) -> Tensor:
    """With zeros up to a length; every rank's part of a message has one size."""
    missing = length - part.shape[dim]
    if missing:
        shape = list(part.shape)
        shape[dim] = missing
        part = torch.cat([part, part.new_zeros(shape)], dim)
    return part.contiguous()
