"""Hollow modules: what stands in a rank's model for modules of other stages. No parameters, no computation."""

import copy
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from samestep.parallel.trace import Call, Seen, imagine, seen_in

Forward = Callable[..., Any]


def hollow(module: nn.Module, device: torch.device, forward: Forward | None = None) -> nn.Module:
    """A module with the class and attributes of another, whose parameters are blank and which calls `forward`.

    The model's own code may look at a layer (its kind, a weight's dtype) without calling it.
    """
    empty = copy.copy(module)
    vars(empty).update({name: OrderedDict() for name in vars(module) if name.endswith("_hooks")})
    empty._parameters = {name: None for name, parameter in module._parameters.items() if parameter is None}
    for name, parameter in module._parameters.items():
        if parameter is not None:
            vars(empty)[name] = blank(parameter.shape, parameter.dtype, device)
    empty._modules = {
        name: child if child is None else hollow(child, device) for name, child in module._modules.items()
    }
    empty._non_persistent_buffers_set = set(module._buffers)  # not in this rank's state
    vars(empty)["forward"] = forward or _not_here
    return empty


def blank(shape: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of any shape that takes no memory. It is not a number, so that no model can learn from it unseen."""
    value = math.nan if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full((), value, dtype=dtype, device=device).expand(shape)


def _not_here(*arguments: Any, **keywords: Any) -> Any:
    raise AssertionError("a module of another pipeline stage was called")


class BlankOutput:
    """The forward of a hollow module: blanks of the shapes that the module would give."""

    def __init__(self, module: nn.Module, call: Call | None, device: torch.device) -> None:
        self._imagined = _without_numbers(module)
        self._call = call
        self._device = device
        self._known: dict[Any, Any] = {}

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        output = self._like_an_argument(arguments, keywords)
        if output is None:
            output = self._imagine(arguments, keywords)
        return pytree.tree_map_only(Seen, lambda seen: blank(seen.shape, seen.dtype, self._device), output)

    def _like_an_argument(self, arguments: Any, keywords: Any) -> Any:
        """The one tensor of a block's output, of the shape of the argument that had the same shape in the trace."""
        if self._call is None or len(self._call.outputs()) != 1:
            return None
        (traced,) = self._call.outputs()
        tensors = [leaf for leaf in pytree.tree_leaves((arguments, keywords)) if isinstance(leaf, Tensor)]
        for seen, tensor in zip(self._call.inputs(), tensors, strict=False):
            if seen.shape == traced.shape and seen.dtype == traced.dtype:
                return _filled(self._call.output, Seen(identity=0, shape=tuple(tensor.shape), dtype=tensor.dtype))
        return None

    def _imagine(self, arguments: Any, keywords: Any) -> Any:
        leaves = pytree.tree_leaves((arguments, keywords))
        key = tuple((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves)
        if key not in self._known:
            self._known[key] = imagine(self._imagined, arguments, keywords)
        return self._known[key]


class Received:
    """The forward of the hollow block before a stage's first: what was received, as the block gave it."""

    def __init__(self, call: Call, tensor: Callable[[], Tensor]) -> None:
        self._call = call
        self._tensor = tensor

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return _filled(self._call.output, self._tensor())


def _filled(nest: Any, value: Any) -> Any:
    """A nest with a value in place of what the trace saw."""
    return pytree.tree_map_only(Seen, lambda _: value, nest)


def hidden_of(output: Any) -> Tensor:
    """The one tensor of a block's output."""
    (hidden,) = (leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor))
    return hidden


def gives_one_tensor(call: Call) -> bool:
    seen = seen_in(call.output)
    return len(seen) == 1 and seen[0].dtype.is_floating_point


def _without_numbers(module: nn.Module) -> nn.Module:
    """A copy of a module whose parameters and buffers have shapes and no memory."""
    tensors: Mapping[int, Tensor] = {id(t): t for t in (*module.parameters(), *module.buffers())}
    memo: dict[int, Any] = {}
    for key, tensor in tensors.items():
        unreal = torch.empty_like(tensor, device="meta")
        memo[key] = nn.Parameter(unreal, requires_grad=False) if isinstance(tensor, nn.Parameter) else unreal
    empty = copy.deepcopy(module, memo)
    for part in empty.modules():
        # Other layouts replace forwards by functions that hold on to the module they were made for.
        vars(part).pop("forward", None)
    return empty.eval()  # shapes are those of training, and dropout draws no masks for tensors without values
