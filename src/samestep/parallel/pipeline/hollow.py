"""Hollow modules: what stands in a rank's model for modules of other stages. No parameters, no computation."""

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.utils import _pytree as pytree

from samestep.parallel.calls import Call, Seen
from samestep.parallel.trace import imagine

Forward = Callable[..., Any]


def hollow(module: nn.Module, device: torch.device, forward: Forward | None = None) -> nn.Module:
    """A module with the class and attributes of another, whose parameters are blank and which calls `forward`.

    The model's own code may look at a layer (its kind, a weight's dtype) without calling it.
    """
    empty = _shallow(module, type(module).__bases__[0] if is_parametrized(module) else type(module))
    for name, value in vars(module).items():
        if name.endswith("_hooks"):
            vars(empty)[name] = OrderedDict()
        elif isinstance(value, (list, tuple)):  # recurrent layers keep their parameters in a list too
            vars(empty)[name] = pytree.tree_map_only(nn.Parameter, partial(_blank_like, device=device), value)
        elif isinstance(value, Tensor) and value.requires_grad:  # a weight that is computed from others
            vars(empty)[name] = _blank_like(value, device)
    empty._parameters = {name: None for name, parameter in module._parameters.items() if parameter is None}
    for name, parameter in module._parameters.items():
        if parameter is not None:
            vars(empty)[name] = _blank_like(parameter, device)
    if is_parametrized(module):
        for name, parameters in cast(nn.ModuleDict, module.parametrizations).items():
            # The largest of those from which it is computed has its shape.
            largest = max(parameters.parameters(recurse=False), key=Tensor.numel)
            vars(empty)[name] = _blank_like(largest, device)
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


class BlankHidden(Tensor):
    """A blank in place of what a module gives: what a model writes to it is no number either, and takes no memory.

    Without this, `x = self.embed(words); x += self.positions` would fail in every stage but the first.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        keywords = kwargs or {}
        if args and isinstance(args[0], BlankHidden) and _writes(getattr(func, "__name__", ""), keywords):
            return args[0]
        with torch._C.DisableTorchFunctionSubclass():
            made = func(*args, **keywords)
            # A part of a blank is a blank.
            return pytree.tree_map_only(Tensor, _kept_blank, made)


def _writes(function: str, keywords: Mapping[str, Any]) -> bool:
    """Whether a function of this name changes its first argument: add_, __iadd__, __setitem__, relu(inplace=True)."""
    dunder = function.startswith("__") and function.endswith("__")
    in_place = function[2:-2] in _IN_PLACE if dunder else function.endswith("_")
    return in_place or bool(keywords.get("inplace"))


_IN_PLACE = frozenset(
    {"setitem", "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor", "idiv"}
)


def _kept_blank(tensor: Tensor) -> Tensor:
    spread = tensor.numel() > 1 and not any(tensor.stride()) and tensor.layout is torch.strided
    return tensor.as_subclass(BlankHidden) if spread and not tensor.requires_grad else tensor


def _blank_like(tensor: Tensor, device: torch.device) -> Tensor:
    return blank(tensor.shape, tensor.dtype, device)


def _shallow(module: nn.Module, kind: type[nn.Module]) -> nn.Module:
    """A module with the same attributes. Python's own copies refuse modules whose weights are computed."""
    empty = kind.__new__(kind)
    vars(empty).update(vars(module))
    return empty


def _not_here(*arguments: Any, **keywords: Any) -> Any:
    raise AssertionError("a module of another pipeline stage was called")


class BlankOutput:
    """The forward of a hollow module: blanks of the shapes that the module would give."""

    def __init__(self, module: nn.Module, call: Call | None, device: torch.device) -> None:
        self._imagined = without_numbers(module)
        self._call = call
        self._device = device
        self._known: dict[Any, Any] = {}

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        output = self._like_arguments(arguments, keywords)
        if output is None:
            output = self._imagine(arguments, keywords)
        blanks = pytree.tree_map_only(Seen, self._blank, output)
        return blanks if self._call is None else _with_passed_on(blanks, self._call, arguments, keywords)

    def _blank(self, seen: Seen) -> Tensor:
        return blank(seen.shape, seen.dtype, self._device).as_subclass(BlankHidden)

    def _like_arguments(self, arguments: Any, keywords: Any) -> Any:
        """A block's output whose tensors have the shapes of arguments that had the same shapes in the trace."""
        if self._call is None:
            return None
        pairs = list(zip(self._call.inputs(), _tensors((arguments, keywords)), strict=False))
        found: dict[int, Seen] = {}
        for traced in self._call.outputs():
            alike = [now for seen, now in pairs if (seen.shape, seen.dtype) == (traced.shape, traced.dtype)]
            if not alike:
                return None
            found[traced.identity] = Seen(identity=0, shape=tuple(alike[0].shape), dtype=alike[0].dtype)
        return pytree.tree_map_only(Seen, lambda seen: found[seen.identity], self._call.output) if found else None

    def _imagine(self, arguments: Any, keywords: Any) -> Any:
        leaves = pytree.tree_leaves((arguments, keywords))
        key = tuple((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves)
        if key not in self._known:
            self._known[key] = imagine(self._imagined, arguments, keywords)
        return self._known[key]


class Received:
    """The forward of the hollow block before a stage's first: what was received, as the block gave it."""

    def __init__(
        self, call: Call, hidden: int, tensor: Callable[[], Tensor], device: torch.device, *, changed: bool
    ) -> None:
        """`changed`: the model changes the hidden state in place, which autograd allows of no leaf."""
        self._call = call
        self._changed = changed
        self._hidden = hidden  # the identity in the trace of the one tensor that later layers take
        self._tensor = tensor
        self._device = device

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        def fill(seen: Seen) -> Tensor:
            if seen.identity == self._hidden:
                return self._tensor().clone() if self._changed else self._tensor()
            return blank(seen.shape, seen.dtype, self._device)  # nobody takes it

        filled = pytree.tree_map_only(Seen, fill, self._call.output)
        return _with_passed_on(filled, self._call, arguments, keywords)


def _with_passed_on(output: Any, call: Call, arguments: Any, keywords: Any) -> Any:
    """An output in which what the traced block passed on of its arguments is what it is given now."""
    given = {seen.identity: now for seen, now in zip(call.inputs(), _tensors((arguments, keywords)), strict=False)}
    leaves, form = pytree.tree_flatten(output)
    places = [number for number, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    for number, seen in zip(places, call.outputs(), strict=False):
        if call.passed_on(seen) and seen.identity in given:
            leaves[number] = given[seen.identity]
    return pytree.tree_unflatten(leaves, form)


def hidden_of(call: Call, hidden: int, output: Any) -> Tensor:
    """What of a block's output is handed on: the tensor that had this identity in the trace of its call."""
    number = [seen.identity for seen in call.outputs()].index(hidden)
    return _tensors(output)[number]


def _tensors(nest: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(nest) if isinstance(leaf, Tensor)]


def without_numbers(module: nn.Module) -> nn.Module:
    """A copy of a module whose parameters and buffers have shapes and no memory."""
    tensors: Mapping[int, Tensor] = {id(t): t for t in (*module.parameters(), *module.buffers())}
    unreal: dict[int, Tensor] = {}
    for key, tensor in tensors.items():
        empty = torch.empty_like(tensor, device="meta")
        unreal[key] = nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty
    copy = _copied(module, unreal, {})
    return copy.eval()  # shapes are those of training, and dropout draws no masks for tensors without values


def _copied(module: nn.Module, unreal: Mapping[int, Tensor], done: dict[int, nn.Module]) -> nn.Module:
    """A copy of a module and all in it, with other tensors in place of its own."""
    if id(module) in done:
        return done[id(module)]
    copied = done[id(module)] = _shallow(module, type(module))
    for name, value in vars(module).items():
        if name == "_modules":
            copied._modules = {
                own: child if child is None else _copied(child, unreal, done) for own, child in value.items()
            }
        elif isinstance(value, (dict, list)):
            vars(copied)[name] = pytree.tree_map_only(Tensor, lambda tensor: unreal.get(id(tensor), tensor), value)
    # Other layouts replace forwards by functions that hold on to the module they were made for.
    vars(copied).pop("forward", None)
    return copied
