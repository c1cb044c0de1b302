"""Counts any model's memory for a step by running its forward on the meta device, which allocates nothing.

Activations are the tensors that autograd saves for the backward, each storage once, without parameters and buffers,
which are counted separately. That is what a step without recomputation adds at its peak, except for tensors that an
operator allocates and frees itself.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from samestep.errors import UserError, described
from samestep.torch_internals.tensors import storage_id


@dataclass(frozen=True, kw_only=True)
class ModuleMemory:
    """Bytes in one process that holds the whole model."""

    parameters: int
    buffers: int
    gradients: int  # of trained parameters
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        return self.parameters + self.buffers + self.gradients + self.optimizer + self.activations


def module_memory(
    build: Callable[[], nn.Module], forward: Callable[[nn.Module], Any], *, state_tensors: int = 2
) -> ModuleMemory:
    """Count the memory of the model that `build` returns, for the forward that `forward` runs with it.

    Both run on the meta device, on which `forward` also creates its tensors. The optimizer has `state_tensors`
    tensors per trained parameter, in its dtype: Adam two. Raises UserError, with the place, for a model that reads
    values.
    """
    try:
        with torch.device("meta"):
            model = build()
            _check(model)
            activations = saved_bytes(lambda: forward(model), {_storage(tensor) for tensor in _held(model)})
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        raise UserError(
            f"the model does not run on the meta device, where tensors have no values: {described(error)}; "
            "use a model whose forward does not look at values, or plan from sizes with --model"
        ) from None
    trained = sum(_bytes(p) for p in model.parameters() if p.requires_grad)
    return ModuleMemory(
        parameters=sum(map(_bytes, model.parameters())),
        buffers=sum(map(_bytes, model.buffers())),
        gradients=trained,
        optimizer=state_tensors * trained,
        activations=activations,
    )


def saved_bytes(run: Callable[[], Any], held: set[int]) -> int:
    """Bytes of the storages that autograd saves while `run` runs, without those in `held`."""
    storages: dict[int, int] = {}
    kept: list[Tensor] = []  # keeps storages alive, so that no address is reused

    def pack(tensor: Tensor) -> Tensor:
        """Count the storage of a tensor that autograd saves, once however many views of it are saved."""
        storage = _storage(tensor)
        if storage not in held:
            storages[storage] = tensor.untyped_storage().nbytes()
            kept.append(tensor.detach())
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(storages.values())


def _storage(tensor: Tensor) -> int:
    """The identity of a tensor's storage, the same for all views of it, such as a transposed weight."""
    return storage_id(tensor.untyped_storage())


def _held(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def _check(model: nn.Module) -> None:
    """Raise ValueError for a parameter that is not on the meta device: the model would really run."""
    real = next((name for name, p in model.named_parameters() if p.device.type != "meta"), None)
    if real is not None:
        raise ValueError(f"parameter {real} is made on a device of its own")


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
