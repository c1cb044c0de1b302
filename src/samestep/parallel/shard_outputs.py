"""Outputs of classes that PyTorch doesn't know: FSDP2 must see the tensors in them, or backward gathers nothing."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class _Output:
    """What a module gave, behind the tensors that were found in it."""

    value: Any


def show_tensors(module: nn.Module) -> None:
    """Let a module give the tensors of an object of the model's own class, and with them the object."""
    forward: Callable[..., Any] = module.forward

    @wraps(forward)
    def shown(*arguments: Any, **keywords: Any) -> Any:
        output = forward(*arguments, **keywords)
        if any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(output)):
            return output
        inside = [leaf for leaf in pytree.tree_leaves(getattr(output, "__dict__", None)) if isinstance(leaf, Tensor)]
        return (*inside, _Output(output)) if inside else output

    module.forward = shown


def hide_tensors(module: nn.Module, arguments: Any, output: Any) -> Any:
    """A forward hook after FSDP2's: the object alone, as the model's own code knows it."""
    hidden = type(output) is tuple and bool(output) and isinstance(output[-1], _Output)
    return output[-1].value if hidden else output
