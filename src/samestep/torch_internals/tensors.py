"""What tensors know of their memory, their history and their hooks."""

from typing import Any

import torch
from torch import Tensor
from torch.utils import _device


def look_up_constructors() -> None:
    """Let PyTorch look up now which functions `with torch.device(...)` applies to, which it does once.

    Who replaces functions such as `torch.ones` calls it before: PyTorch would remember the replacements. Tried with
    2.4 to 2.14; where it is missing, nothing is looked up early.
    """
    look_up = getattr(_device, "_device_constructors", None)
    if look_up is not None:
        look_up()


def storage_id(storage: torch.UntypedStorage) -> int:
    """The address of a storage's own record in C++: the same for all its views, also where it has no memory.

    `data_ptr()`, the public one, is 0 for every storage on the meta device and for every empty one. Once this storage
    is freed, another may get the address, unless a `StorageWeakRef` keeps it.
    """
    return storage._cdata


def base_of(tensor: Tensor) -> Tensor | None:
    """The tensor of which this one is a view, as autograd knows it; None if it is no view."""
    return tensor._base


def is_view(tensor: Tensor) -> bool:
    """Whether autograd knows a tensor as a view of another."""
    return tensor._is_view()


def version_of(tensor: Tensor) -> int:
    """How often a tensor's values were changed in place; views count with their base."""
    return tensor._version


def gradient_hooks(parameter: Tensor) -> list[Any]:
    """The hooks that `register_hook` left on a tensor's gradient."""
    return list((parameter._backward_hooks or {}).values())


def has_gradient_hooks(parameter: Tensor) -> bool:
    """Whether a tensor has hooks on its gradient, before or after it is accumulated."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def wrapper_subclass(kind: type[Tensor], size: tuple[int, ...], **options: Any) -> Any:
    """Make a tensor of a subclass that has a shape, a dtype and a device, and no memory."""
    return torch.Tensor._make_wrapper_subclass(kind, size, **options)  # pyright: ignore[reportAttributeAccessIssue]


def takes_over_memory(device: torch.device) -> bool:
    """Whether a parameter may get its memory from the CPU's to a device's and stay the same object.

    False for devices of extensions.
    """
    return torch._has_compatible_shallow_copy_type(torch.empty(0), torch.empty(0, device=device))
