"""Offload of activations: tensors that a block saves for backward are kept in host memory (Rhu et al. 2016)."""

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
from samestep.torch_internals.tensors import base_of

_SMALLEST = 1024  # bytes; smaller tensors are not worth a copy


def offload_activations(blocks: Sequence[nn.Module], memory: HostMemory) -> None:
    """Make each block copy the tensors that it saves for backward to `memory`, and back when backward needs them.

    On an accelerator the copies are asynchronous: in the order of the device's work, while the CPU goes on. On a CPU
    they are copies within its memory, so that the same code runs there. Parameters stay where they are.

    By PyTorch's `saved_tensors_hooks`: `pack` is called when an operator saves a tensor for its backward, `unpack`
    when that backward runs. A tensor saved by two operators is copied twice.
    """
    for block in blocks:
        # The forward is replaced, not the module, so that parameters keep their names.
        wrap_forward(block, partial(_offloading, block, memory))


def _offloading(block: nn.Module, memory: HostMemory, forward: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a block's forward, with the tensors that autograd saves copied to host memory."""
    parameters = {address(local(parameter.detach())) for parameter in block.parameters()}

    def pack(tensor: Tensor) -> Any:
        if _stays(tensor) or address(tensor) in parameters:
            return tensor
        # The device's memory is freed as soon as the forward drops the tensor.
        return _Away(tensor, memory)

    with saved_tensors_hooks(pack, _unpack):
        return forward(*args, **kwargs)


def _stays(tensor: Tensor) -> bool:
    """Whether a saved tensor is not offloaded: a parameter, a DTensor, a small or an expanded tensor."""
    base = tensor if base_of(tensor) is None else base_of(tensor)
    return (
        isinstance(base, nn.Parameter)  # also one that FSDP2 gathered
        or isinstance(tensor, DTensor)
        or tensor.layout is not torch.strided
        or tensor.nbytes < _SMALLEST
        or tensor.untyped_storage().nbytes() < tensor.nbytes  # expanded: a copy would be larger
    )


class _Away:
    """An offloaded tensor; its host memory is reused when autograd drops this object."""

    def __init__(self, tensor: Tensor, memory: HostMemory) -> None:
        self._device = tensor.device
        self._pinned = memory.pinned
        self._copy = memory.lend(tensor.detach(), until_gone=self)
        self._copy.copy_(tensor.detach(), non_blocking=self._pinned)

    def back(self) -> Tensor:
        """Copy the tensor back to its device, in stream order after the copy to the host."""
        # Always a copy, since the host memory may be reused while the result is still in use.
        return self._copy.to(self._device, non_blocking=self._pinned, copy=True)


def _unpack(packed: Any) -> Tensor:
    return packed.back() if isinstance(packed, _Away) else packed
