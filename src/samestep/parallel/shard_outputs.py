"""Outputs of sharded modules: FSDP2 must see the tensors in them, and its backward must not begin in the forward."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from samestep.errors import LayoutError
from samestep.layout import Layout
from samestep.parallel.moment import Now


@dataclass(frozen=True)
class _Output:
    """What a module gave, behind the tensors that were found in it."""

    value: Any


class _Alias(torch.autograd.Function):
    """Forward and backward: identity. The same memory, and no view to autograd."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        return grad_outputs[0]


def no_view(tensor: Tensor) -> Tensor:
    """A tensor that may be changed in place by what takes it, such as `hidden += positions`.

    A change of a view goes round the hook by which FSDP2 gathers a module's parameters for its backward.
    """
    return _Alias.apply(tensor) if tensor.requires_grad and tensor._is_view() else tensor


def show_tensors(module: nn.Module) -> None:
    """Let a module give the tensors of an object of the model's own class, and with them the object."""
    forward: Callable[..., Any] = module.forward

    @wraps(forward)
    def shown(*arguments: Any, **keywords: Any) -> Any:
        output = forward(*arguments, **keywords)
        if any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(output)):
            return pytree.tree_map_only(Tensor, no_view, output)
        inside = [leaf for leaf in pytree.tree_leaves(getattr(output, "__dict__", None)) if isinstance(leaf, Tensor)]
        return (*inside, _Output(output)) if inside else output

    module.forward = shown


def hide_tensors(module: nn.Module, arguments: Any, output: Any) -> Any:
    """A forward hook after FSDP2's: the object alone, as the model's own code knows it."""
    hidden = type(output) is tuple and bool(output) and isinstance(output[-1], _Output)
    return output[-1].value if hidden else output


def refuse_gradients_in_forward(module: nn.Module, described: str, layout: Layout, now: Now) -> None:
    """Have a module's outputs raise LayoutError where the forward itself takes gradients through the module.

    FSDP2 frees the gathered parameters once backward has passed the module. A second backward, through these
    gradients, would read memory that is freed by then.
    """

    def refuse(gradient: Tensor) -> None:
        if now.moment is not None and not now.recomputing:
            raise LayoutError(
                f'layout "{layout}": the forward takes gradients through {described}, whose '
                "parameters are sharded and freed after one backward, while a gradient of these gradients needs them "
                f"again; use dp{layout.size}, or zero1x{layout.size}"
            )

    def watch(module: nn.Module, arguments: Any, output: Any) -> None:
        for tensor in pytree.tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad and now.moment is not None:
                tensor.register_hook(refuse)

    module.register_forward_hook(watch)
