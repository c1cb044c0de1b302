"""The registries of `nn.Module`, base classes of layers, and marks that wrappers leave on modules."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.utils.parametrizations import _SpectralNorm

AnyBatchNorm = _BatchNorm  # BatchNorm1d, 2d, 3d and SyncBatchNorm
AnyDropout = _DropoutNd  # all that zero elements or channels
SpectralNorm = _SpectralNorm  # the parametrization; its buffers are SPECTRAL_NORM_VECTORS
SPECTRAL_NORM_VECTORS = ("_u", "_v")

# Reads what `module.to(...)` was asked for: a device, a dtype, whether not to wait, a memory format.
read_to = torch._C._nn._parse_to  # pyright: ignore[reportAttributeAccessIssue]

# Attributes in which a module keeps what is registered with it.
REGISTRIES = ("_parameters", "_buffers", "_modules")


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """A module's own parameters by attribute, without its children's; those that are None are there as well.

    It is the module's own dictionary: a change of it changes the module, without the checks of `register_parameter`.
    """
    return module._parameters


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """A module's own buffers by attribute, also those that are None; the module's own dictionary."""
    return module._buffers


def own_children(module: nn.Module) -> dict[str, nn.Module | None]:
    """A module's children by attribute, also those that are None, and second names; the module's own dictionary."""
    return module._modules


def set_parameters(module: nn.Module, parameters: Mapping[str, nn.Parameter | None]) -> None:
    """Give a module another dictionary of parameters."""
    module._parameters = dict(parameters)


def set_children(module: nn.Module, children: Mapping[str, nn.Module | None]) -> None:
    """Give a module another dictionary of children."""
    module._modules = dict(children)


def unsaved_buffers(module: nn.Module) -> set[str]:
    """The names of a module's buffers that its `state_dict` leaves out; the module's own set."""
    return module._non_persistent_buffers_set


def save_no_buffers(module: nn.Module) -> None:
    """Leave all of a module's own buffers out of its `state_dict`."""
    module._non_persistent_buffers_set = set(module._buffers)


def backward_hooks(module: nn.Module) -> list[Any]:
    """The hooks that are called in a module's backward."""
    return [*module._backward_hooks.values(), *module._backward_pre_hooks.values()]


def forward_hooks(module: nn.Module) -> list[Any]:
    """The hooks that are called before and after a module's forward."""
    return [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]


def hooks_after_forward(module: nn.Module) -> dict[int, Any]:
    """The hooks that are called after a module's forward, by number; the module's own dictionary."""
    return module._forward_hooks


def takes_keywords(module: nn.Module, number: int) -> bool:
    """Whether a hook after the forward, by its number, also gets the forward's keyword arguments."""
    return number in module._forward_hooks_with_kwargs


def apply_to_tensors(module: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
    """Replace every parameter and buffer by what a function makes of it, in the way of `Module.to`."""
    module._apply(function)


def is_compiled(model: object) -> bool:
    """Whether `torch.compile` made a module."""
    return hasattr(model, "_orig_mod")


# Wrappers by their classes' names, and the attribute in which each keeps the wrapped module.
WRAPPERS: Mapping[str, str] = {
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "OptimizedModule": "_orig_mod",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "OffloadWrapper": "_checkpoint_wrapped_module",
}
