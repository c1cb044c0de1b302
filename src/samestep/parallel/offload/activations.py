"""Offload of activations: what a block keeps for its backward waits in the host's memory (Rhu et al. 2016)."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from samestep.parallel.attributes import wrap_forward
from samestep.parallel.offload.memory import HostMemory, address
from samestep.parallel.sharding import local

_SMALLEST = 1024  # bytes; for less a copy isn't worth its start


def offload_activations(blocks: Sequence[nn.Module], memory: HostMemory) -> None:
    """Make each block copy what it keeps for backward to `memory`, and back when backward asks for it.

    On an accelerator the copies are asynchronous: in the order of the device's work, while the CPU goes on. On a CPU
    they are copies within its memory, so that the same code runs there. Parameters stay where they are.

    By PyTorch's `saved_tensors_hooks`: `pack` is called when an operator saves a tensor for its backward, `unpack`
    when that backward runs. A tensor saved by two operators is copied twice.
    """
    for block in blocks:
        # The forward is replaced rather than the module, so that every parameter keeps its name.
        wrap_forward(block, partial(_offloading, block, memory))


def _offloading(block: nn.Module, memory: HostMemory, forward: Any, *args: Any, **kwargs: Any) -> Any:
    """A block's forward, during which what autograd saves goes to the host's memory."""
    parameters = {address(local(parameter.detach())) for parameter in block.parameters()}

    def pack(tensor: Tensor) -> Any:
        if _stays(tensor) or address(tensor) in parameters:
            return tensor
        # The device's memory is free as soon as the forward lets go of the tensor.
        return _Away(tensor, memory)

    with saved_tensors_hooks(pack, _unpack):
        return forward(*args, **kwargs)


def _stays(tensor: Tensor) -> bool:
    """Whether a saved tensor is left where it is: a parameter, a sharded one, a small or an expanded one."""
    base = tensor if tensor._base is None else tensor._base
    return (
        isinstance(base, nn.Parameter)  # also one that FSDP2 gathered
        or isinstance(tensor, DTensor)
        or tensor.layout is not torch.strided
        or tensor.nbytes < _SMALLEST
        or tensor.untyped_storage().nbytes() < tensor.nbytes  # expanded: the copy would be larger
    )


class _Away:
    """A tensor that waits in the host's memory for as long as autograd keeps this."""

    def __init__(self, tensor: Tensor, memory: HostMemory) -> None:
        self._device = tensor.device
        self._pinned = memory.pinned
        self._copy = memory.lend(tensor.detach(), until_gone=self)
        self._copy.copy_(tensor.detach(), non_blocking=self._pinned)

    def back(self) -> Tensor:
        """The tensor on its device again: enqueued in the device's stream, after the copy that took it away."""
        # Always a copy: the memory is used again while the result may still be used.
        return self._copy.to(self._device, non_blocking=self._pinned, copy=True)


def _unpack(packed: Any) -> Tensor:
    return packed.back() if isinstance(packed, _Away) else packed
