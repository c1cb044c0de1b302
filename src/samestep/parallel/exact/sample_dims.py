"""Where the samples are in the random numbers that a module draws, if not in the first dimension.

Libraries write their dropout and draws for shapes of their own, such as [2, samples, tokens] for the experts of a
token, or [tokens, samples, features]. By its size that dimension can't be told from others: as many samples as
tokens, or two in a micro-batch, would be taken for the wrong ones. So the user says it, where the model is built.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from samestep.errors import UserError
from samestep.parallel.exact.forward_context import Positions

_ATTRIBUTE = "_samestep_draws_along"


def draws_along(module: nn.Module, dim: int) -> nn.Module:
    """Say that samples are dimension `dim` of what a module and the modules within it draw or drop; returns it.

    For code of other people, whose tensors are such as [tokens, samples, features] (`dim=1`). A module within it may
    have a dimension of its own, also 0. Attention's weights, and single numbers, are not concerned.
    """
    if isinstance(dim, bool) or not isinstance(dim, int) or dim < 0:
        raise UserError(f"draws_along(dim={dim!r}): a dimension is counted from the first one, which is 0")
    if not isinstance(module, nn.Module):
        raise UserError(f"draws_along({type(module).__name__}): the first argument is a module of the model")
    setattr(module, _ATTRIBUTE, dim)
    return module


def dims_of(model: nn.Module) -> Mapping[str, int]:
    """The dimension of samples by module name, as `draws_along` said it; modules with the first one are left out."""
    dims: dict[str, int] = {}

    def walk(module: nn.Module, name: str, dim: int) -> None:
        dim = getattr(module, _ATTRIBUTE, dim)
        if dim:
            dims[name] = dim
        for key, child in module.named_children():
            walk(child, f"{name}.{key}" if name else key, dim)

    walk(model, "", 0)
    return dims


def samples_first(shape: Sequence[int], dim: int) -> tuple[int, ...]:
    """A shape with the samples first: [k, samples, ...] to [samples, ..., k]."""
    return (*shape[dim:], *shape[:dim])


def parts_of(parts: Mapping[int, Positions], shape: Sequence[int], dim: int) -> Mapping[int, Positions]:
    """The dimensions of a rank's part of a tensor after `samples_first`.

    They count from the samples or from the end; 0 are tokens in front of the samples.
    """
    if not dim:
        return parts
    return {len(shape) - dim if key == 0 else key if key > 0 else key - dim: at for key, at in parts.items()}


def samples_back(numbers: Tensor, dim: int) -> Tensor:
    """Undo `samples_first`: [samples, ..., k] to [k, samples, ...]."""
    return numbers.permute(*samples_first(range(numbers.ndim), numbers.ndim - dim)) if dim else numbers
