"""Buffers that a forward fills from its samples: each rank would fill its own, so they are found and refused."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from samestep.errors import UserError
from samestep.parallel.complex_parameters import as_real

Versions = dict[str, tuple[int, int, torch.Size]]


def versions(model: nn.Module) -> Versions:
    """Which tensor each buffer is, how often it was written to, and its shape."""
    return {name: (id(buffer), buffer._version, buffer.shape) for name, buffer in model.named_buffers()}


def check_buffers(model: nn.Module, before: Versions, group: dist.ProcessGroup) -> None:
    """Raise UserError where a step has left other values in a buffer on other ranks. Every rank of a group asks."""
    after = versions(model)
    buffers = dict(model.named_buffers())
    device = next(model.parameters()).device
    sums = torch.stack([torch.zeros((), dtype=torch.float64, device=device), *map(_sum, buffers.values())])
    changed = torch.tensor([0, *(_is_filled(before.get(name), each) for name, each in after.items())], device=device)
    # The largest and, with the sign turned, the smallest of all ranks.
    message = torch.cat([sums, -sums, changed.double()])
    dist.all_reduce(message, dist.ReduceOp.MAX, group=group)
    largest, smallest, changed = message.split(len(sums))
    for name, high, low, any_changed in zip(["", *buffers], largest, -smallest, changed, strict=True):
        if any_changed and high != low:
            raise UserError(
                f"the buffer {name} of the model has other values on other ranks after a step: its forward fills it "
                "from the samples that it sees, which are not the global batch; batch norm's own statistics are kept "
                "the same; where this buffer is a mean or a sum over the batch, have the task's batch_buffers() give "
                f'{{"{name}": "mean"}} or "sum", and else make it a function of the step alone'
            )


def _is_filled(before: tuple[int, int, torch.Size] | None, after: tuple[int, int, torch.Size]) -> bool:
    """Whether a buffer was written to. One of another shape is a cache, which is as long as a rank's inputs."""
    return before != after and (before is None or before[2] == after[2])


def _sum(buffer: Tensor) -> Tensor:
    """A number that differs where buffers do, but for rare cases."""
    flat = as_real(buffer.detach()).double().flatten()
    return (flat * torch.arange(1, len(flat) + 1, device=flat.device)).sum().nan_to_num()
