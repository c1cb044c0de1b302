"""Offload of parameters to disk: a rank's shards and their optimizer state are in a memory-mapped file.

The system reads its pages when a block is gathered or stepped, and may drop them after the step (Rajbhandari et al.
2021, ZeRO-Infinity).
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from samestep.parallel.deferred_init import look_again
from samestep.parallel.offload.memory import MappedFile
from samestep.parallel.sharding import local


def empty_in(file: MappedFile, tensor: Tensor) -> Tensor:
    """Allocate a tensor like the given one in the file; for a DTensor its local shard."""
    shard = local(tensor)
    memory = file.empty(shard.shape, shard.dtype)
    if not isinstance(tensor, DTensor):
        return memory
    return DTensor.from_local(
        memory,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


@torch.no_grad()
def move_parameters(model: nn.Module, file: MappedFile) -> None:
    """Move a rank's parameters or shards into the file, one after another; tied parameters stay tied."""
    moved: dict[int, nn.Parameter] = {}
    for name, parameter in dict(model.named_parameters(remove_duplicate=False)).items():
        if id(parameter) not in moved:
            there = _moved(file, parameter)
            moved[id(parameter)] = nn.Parameter(there, requires_grad=parameter.requires_grad)
        owner, _, own_name = name.rpartition(".")
        setattr(model.get_submodule(owner), own_name, moved[id(parameter)])
    # FSDP2 copies a shard back into memory if it pads it, as the rows don't divide by the ranks.
    # FSDP2 keeps its own views of the local shards, which must be those in the file.
    look_again(model)


def keep_state(optimizer: Optimizer, file: MappedFile) -> None:
    """After every step, move new optimizer state into the file, and release the file's pages from memory."""

    def move(stepped: Optimizer, *_: Any) -> None:
        for state in stepped.state.values():
            for name, value in state.items():
                if isinstance(value, Tensor) and value.ndim and local(value).numel() and not file.holds(local(value)):
                    state[name] = _moved(file, value)
        file.let_go()

    optimizer.register_step_post_hook(move)


def _moved(file: MappedFile, tensor: Tensor) -> Tensor:
    """Copy a tensor, or the local shard of a DTensor, into the file."""
    there = empty_in(file, tensor.detach())
    local(there).copy_(local(tensor.detach()))
    return there
