"""Blanks: placeholder modules and tensors in a rank's model, for modules that are on other ranks of the pipeline.

A placeholder has the attributes of the module and no parameters; its outputs have the right shapes and no values.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from samestep.data.nests import map_tensors, tensors_in
from samestep.parallel.calls import Call, Seen
from samestep.parallel.exact.dropout import undrawn
from samestep.parallel.exact.forward_context import NotesTokens
from samestep.parallel.trace import imagine
from samestep.torch_internals import pytree
from samestep.torch_internals.modules import (
    hooks_after_forward,
    own_children,
    own_parameters,
    save_no_buffers,
    set_children,
    set_parameters,
    takes_keywords,
)
from samestep.torch_internals.operators import DisableTorchFunctionSubclass

Forward = Callable[..., Any]

# The hooks of every module. A class may have others, of which samestep knows nothing: a GraphModule has lists.
_HOOKS = frozenset(name for name, value in vars(nn.Module()).items() if name.endswith("_hooks") and value is not None)


_IN_PLACE = frozenset(
    {"setitem", "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor", "idiv"}
)


def placeholder_module(module: nn.Module, device: torch.device, forward: Forward | None = None) -> nn.Module:
    """Make a module with another's class and attributes and blank parameters, which calls `forward`.

    The model's own code may read a layer's attributes (its class, a weight's dtype) without calling it.
    """
    empty = _shallow(module, type(module).__bases__[0] if is_parametrized(module) else type(module))
    for name, value in vars(module).items():
        if name in _HOOKS:
            vars(empty)[name] = _hooks_for_all(value)
        elif isinstance(value, (list, tuple)):  # recurrent layers keep their parameters in a list too
            vars(empty)[name] = pytree.tree_map_only(nn.Parameter, partial(_blank_like, device=device), value)
        elif isinstance(value, Tensor) and value.requires_grad:  # a weight computed from other parameters
            vars(empty)[name] = _blank_like(value, device)
    set_parameters(empty, {name: None for name, parameter in own_parameters(module).items() if parameter is None})
    for name, parameter in own_parameters(module).items():
        if parameter is not None:
            vars(empty)[name] = _blank_like(parameter, device)
    if is_parametrized(module):
        for name, parameters in cast(nn.ModuleDict, module.parametrizations).items():
            # The largest of the original parameters has its shape.
            largest = max(parameters.parameters(recurse=False), key=Tensor.numel)
            vars(empty)[name] = _blank_like(largest, device)
    children = {
        name: child if child is None else placeholder_module(child, device)
        for name, child in own_children(module).items()
    }
    set_children(empty, children)
    save_no_buffers(empty)
    vars(empty)["forward"] = forward or _not_here
    return empty


def stand_in(module: nn.Module, device: torch.device, forward: Forward, *, held: bool) -> nn.Module:
    """Make a module that calls `forward` in place of another module's forward.

    `held`: this rank has the other module's parameters, which the model's own code may read from the stand-in.
    """
    if not held:
        empty = placeholder_module(module, device, forward)
        for name, part in module.named_modules():
            vars(empty.get_submodule(name))["parameters"] = blank_parameters(part, device)
        return empty
    standing = _shallow(module, type(module))
    for name, value in vars(module).items():
        if name in _HOOKS:
            vars(standing)[name] = _hooks_for_all(value)
    vars(standing)["forward"] = forward
    return standing


def blank_parameters(module: nn.Module, device: torch.device) -> Callable[..., Iterator[Tensor]]:
    """What is to be called as `parameters` of a module whose own are on other ranks: it gives blanks of them.

    The model's own code asks for a parameter's dtype or device so, such as `next(self.parameters()).dtype`.
    """
    forms = [(parameter.shape, parameter.dtype) for parameter in module.parameters()]
    own = sum(1 for _ in module.parameters(recurse=False))  # they come first

    def parameters(recurse: bool = True) -> Iterator[Tensor]:
        for shape, dtype in forms if recurse else forms[:own]:
            yield blank(shape, dtype, device).as_subclass(BlankHidden)

    return parameters


def own_hooks(module: nn.Module) -> Callable[..., None]:
    """A function that calls a module's hooks after its forward, as far as they are the model's own.

    Such as those by which transformers' backbones collect hidden states. A call that another stage has computed has
    been through them there, so what they return here is left out. Those of PyTorch and samestep are about the
    module's own parameters and computation.
    """
    hooks = [
        (hook, takes_keywords(module, number))
        for number, hook in hooks_after_forward(module).items()
        if _is_the_models(hook)
    ]

    def run(standing: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
        for hook, with_keywords in hooks:
            hook(standing, arguments, *([keywords] if with_keywords else []), output)

    return run


def _is_the_models(hook: Any) -> bool:
    while isinstance(hook, partial):
        hook = hook.func
    place = getattr(hook, "__module__", None) or type(hook).__module__
    return place.partition(".")[0] not in ("samestep", "torch")


def _hooks_for_all(hooks: Mapping[int, Any]) -> "OrderedDict[int, Any]":
    """The hooks that a stand-in keeps: those that every stage needs."""
    return OrderedDict((number, hook) for number, hook in hooks.items() if isinstance(hook, NotesTokens))


def blank(shape: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of any shape without memory. Its values are NaN, so that a use of them would not go unnoticed."""
    # An expanded scalar, with stride 0 in every dimension.
    value = math.nan if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full((), value, dtype=dtype, device=device).expand(shape)


class BlankHidden(Tensor):
    """A blank in place of a module's output or weight, which ignores in-place writes.

    Without this, `x = self.embed(words); x += self.positions` would fail in every stage but the first, and so would
    models that rescale the weights of their layers.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        keywords = kwargs or {}
        if args and isinstance(args[0], BlankHidden) and _writes(getattr(func, "__name__", ""), keywords):
            return args[0]
        with DisableTorchFunctionSubclass():
            made = func(*args, **keywords)
            # Views of a blank are blanks.
            return pytree.tree_map_only(Tensor, _kept_blank, made)


def _writes(function: str, keywords: Mapping[str, Any]) -> bool:
    """Whether a function of this name changes its first argument: add_, __iadd__, __setitem__, relu(inplace=True)."""
    dunder = function.startswith("__") and function.endswith("__")
    in_place = function[2:-2] in _IN_PLACE if dunder else function.endswith("_")
    return in_place or bool(keywords.get("inplace"))


def _kept_blank(tensor: Tensor) -> Tensor:
    """Mark a result as a blank if it is still an expanded scalar."""
    spread = tensor.numel() > 1 and not any(tensor.stride()) and tensor.layout is torch.strided
    return tensor.as_subclass(BlankHidden) if spread and not tensor.requires_grad else tensor


def _blank_like(tensor: Tensor, device: torch.device) -> Tensor:
    return blank(tensor.shape, tensor.dtype, device).as_subclass(BlankHidden)


def _shallow(module: nn.Module, kind: type[nn.Module]) -> nn.Module:
    """A shallow copy of a module; Python's copy fails for parametrized modules."""
    empty = object.__new__(kind)  # a GraphModule makes another class in `__new__`, without its forward
    vars(empty).update(vars(module))
    return empty


def _not_here(*arguments: Any, **keywords: Any) -> Any:
    raise AssertionError("a module of another pipeline stage was called")


class BlankOutput:
    """Computes blanks with the shapes of a module's output, for the arguments of a call."""

    def __init__(self, module: nn.Module, call: Call, device: torch.device) -> None:
        """`module`: a copy without values; `call`: one of its traced calls."""
        self._imagined = module
        self._call = call
        self._device = device
        self._known: dict[Any, Any] = {}
        self._wants_values = False

    def __call__(self, arguments: Any, keywords: Any) -> Any:
        """Make a nest like the module's output, of blanks and of arguments that the module returns unchanged."""
        # Most modules give a tensor of an argument's shape, which is seen from the trace. Only the others are run on
        # shapes: this stage would otherwise run the Python code of every layer that other stages hold.
        tensors = tensors_in((arguments, keywords))
        output = self._like_arguments(self._pairs(arguments, keywords, tensors))
        if output is None:
            with undrawn():
                output = self._imagine(arguments, keywords)
        return map_tensors(partial(self._filled, tensors), output, Seen)

    def _filled(self, tensors: Sequence[Tensor], seen: Seen) -> Tensor:
        if seen.identity >= 0:
            return tensors[seen.identity]
        return blank(seen.shape, seen.dtype, self._device).as_subclass(BlankHidden)

    def _pairs(self, arguments: Any, keywords: Any, tensors: Sequence[Tensor]) -> dict[int, tuple[Seen, Tensor]]:
        """Match argument tensors with those of the traced call: number of the tensor -> (traced, given).

        An argument may be missing in one of the two, such as a mask.
        """
        numbers = {id(tensor): number for number, tensor in enumerate(tensors)}
        before, now = (
            dict(pytree.tree_leaves_with_path(nest, is_leaf=lambda value: isinstance(value, Seen)))
            for nest in ((tuple(self._call.arguments), dict(self._call.keywords)), (tuple(arguments), dict(keywords)))
        )
        return {
            numbers[id(tensor)]: (before[path], tensor)
            for path, tensor in now.items()
            if id(tensor) in numbers and isinstance(before.get(path), Seen)
        }

    def _like_arguments(self, pairs: Mapping[int, tuple[Seen, Tensor]]) -> Any:
        """Infer output shapes from arguments that had the same shapes as the outputs in the trace.

        None if an output matches no argument, or arguments that now differ in shape.
        """
        if not _is_plain(self._call.output):
            return None
        outputs: dict[int, Seen] = {}
        for number, (seen, now) in pairs.items():
            if any(
                seen.identity == output.identity and self._call.passed_on(output) for output in self._call.outputs()
            ):
                outputs[seen.identity] = Seen(identity=number, shape=tuple(now.shape), dtype=now.dtype)
        for output in self._call.outputs():
            alike = {
                (tuple(now.shape), now.dtype)
                for seen, now in pairs.values()
                if (seen.shape, seen.dtype) == (output.shape, output.dtype)
            }
            if self._call.passed_on(output):
                if output.identity not in outputs:
                    return None
                continue
            if len(alike) != 1:
                return None
            ((shape, dtype),) = alike
            outputs[output.identity] = Seen(identity=-1, shape=shape, dtype=dtype)
        return map_tensors(lambda seen: outputs[seen.identity], self._call.output, Seen) if outputs else None

    def _imagine(self, arguments: Any, keywords: Any) -> Any:
        """Run the module without values, or with those that its code asks for; cached by shapes."""
        leaves = pytree.tree_leaves((arguments, keywords))
        key = tuple((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves)
        if key in self._known:
            return self._known[key]
        if not self._wants_values:
            try:
                imagined = self._known[key] = imagine(self._imagined, arguments, keywords)
                return imagined
            except Exception:  # whatever a model's own code raises where it finds no values
                self._wants_values = True
        try:
            return imagine(
                self._imagined, arguments, keywords, valued=lambda tensor: not isinstance(tensor, BlankHidden)
            )
        except Exception:  # the same, of values that this stage doesn't have
            imagined = self._known[key] = imagine(self._imagined, arguments, keywords, computed=True)
            return imagined


def _is_plain(output: Any) -> bool:
    """Whether a traced output consists of tensors, tuples and lists only."""
    if isinstance(output, (tuple, list)):
        return all(_is_plain(part) for part in output)
    return output is None or isinstance(output, Seen)


def without_numbers(module: nn.Module) -> nn.Module:
    """Copy a module, with parameters and buffers that have shapes and no memory."""
    tensors: Mapping[int, Tensor] = {id(t): t for t in (*module.parameters(), *module.buffers())}
    unreal: dict[int, Tensor] = {}
    for key, tensor in tensors.items():
        empty = torch.empty_like(tensor, device="meta")
        unreal[key] = nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty
    copy = _copied(module, unreal, {})
    return copy.eval()  # shapes are those of training, and dropout draws no masks for tensors without values


def _copied(module: nn.Module, unreal: Mapping[int, Tensor], done: dict[int, nn.Module]) -> nn.Module:
    """Copy a module and its submodules, with other tensors in place of its own."""
    if id(module) in done:
        return done[id(module)]
    copied = done[id(module)] = _shallow(module, type(module))
    for name, value in vars(module).items():
        if value is own_children(module):
            children = {own: child if child is None else _copied(child, unreal, done) for own, child in value.items()}
            set_children(copied, children)
        elif value is hooks_after_forward(module):  # the model's own collect outputs, of which these are none
            vars(copied)[name] = OrderedDict((key, hook) for key, hook in value.items() if not _is_the_models(hook))
        elif isinstance(value, (dict, list)):
            vars(copied)[name] = pytree.tree_map_only(Tensor, lambda tensor: unreal.get(id(tensor), tensor), value)
    # Replaced forwards refer to the original module.
    vars(copied).pop("forward", None)
    return copied
