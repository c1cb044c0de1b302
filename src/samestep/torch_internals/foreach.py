"""One operation on a list of tensors, in a few kernels, as PyTorch's optimizers and `clip_grad_norm_` use them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def add_(tensors: Sequence[Tensor], others: Any) -> None:
    """Add to each tensor, in place, the one of the same position in `others`."""
    torch._foreach_add_(list(tensors), others)


def copy_(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    """Overwrite each tensor by the one of the same position in `others`."""
    torch._foreach_copy_(list(tensors), list(others))


def div_(tensors: Sequence[Tensor], by: Any) -> None:
    """Divide each tensor, in place, by a number or by a tensor of one element."""
    torch._foreach_div_(list(tensors), by)


def mul_(tensors: Sequence[Tensor], by: Any) -> None:
    """Multiply each tensor, in place, by a number or by a tensor of one element."""
    torch._foreach_mul_(list(tensors), by)


def norm(tensors: Sequence[Tensor], *args: Any, **kwargs: Any) -> list[Tensor]:
    """The norm of each tensor."""
    return list(torch._foreach_norm(list(tensors), *args, **kwargs))


def zero_(tensors: Sequence[Tensor]) -> None:
    """Set each tensor to zero."""
    torch._foreach_zero_(list(tensors))
