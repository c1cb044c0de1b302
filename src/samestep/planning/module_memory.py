"""What any model keeps in memory for a step, counted by running its forward on the meta device: nothing is allocated.

Activations are the tensors that autograd saves for the backward, each storage once, without parameters and buffers,
which are there anyway. That is what a step without recomputation adds at its peak, but for tensors that an operator
makes and frees again.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from samestep.errors import UserError, described


@dataclass(frozen=True, kw_only=True)
class ModuleMemory:
    """Bytes of one process that holds the whole model."""

    parameters: int
    buffers: int
    gradients: int  # of what is trained
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        return self.parameters + self.buffers + self.gradients + self.optimizer + self.activations


def module_memory(
    build: Callable[[], nn.Module], forward: Callable[[nn.Module], Any], *, state_tensors: int = 2
) -> ModuleMemory:
    """The memory of a model that `build` makes, for a forward that `forward` calls with it, on the meta device.

    Tensors that `forward` makes are on that device as well. The optimizer keeps `state_tensors` tensors for each that
    is trained, in its dtype: Adam two. Raises UserError for a model that can't run without values, and says where.
    """
    try:
        with torch.device("meta"):
            model = build()
            _check(model)
            activations = saved_bytes(lambda: forward(model), {_storage(each) for each in _held(model)})
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


def saved_bytes(run: Callable[[], Any], known: set[int]) -> int:
    """Bytes of the storages that autograd saves while `run` runs, but for those that are known."""
    storages: dict[int, int] = {}
    kept: list[Tensor] = []  # so that no storage's address is used again

    def pack(tensor: Tensor) -> Tensor:
        """Called for each tensor that autograd saves; a storage is counted once, however many views are saved."""
        storage = _storage(tensor)
        if storage not in known:
            storages[storage] = tensor.untyped_storage().nbytes()
            kept.append(tensor.detach())
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(storages.values())


def _storage(tensor: Tensor) -> int:
    """What tells a storage from others, also where a tensor is a view of it, such as a weight transposed."""
    return tensor.untyped_storage()._cdata


def _held(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def _check(model: nn.Module) -> None:
    """Raise ValueError for a model with parameters in memory: it would be run for real."""
    real = next((name for name, p in model.named_parameters() if p.device.type != "meta"), None)
    if real is not None:
        raise ValueError(f"parameter {real} is made on a device of its own")


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
