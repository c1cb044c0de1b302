"""Parameters that lie where PyTorch doesn't look for them, and writes to parameters in a forward."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from samestep.parallel.exact.generators import is_foreign

# Where it lies, such as "blocks.0.more[1]"; in what, such as "a plain list"; and itself.
Held = tuple[str, str, Tensor]

_REGISTERED = ("_parameters", "_buffers", "_modules")
_DEPTH = 4  # of lists in lists


def held_in(owner: Any, path: str) -> Iterator[Held]:
    """The parameters, and the tensors that gather gradients as these do, in an object's plain attributes."""
    for key, value in getattr(owner, "__dict__", {}).items():
        if key not in _REGISTERED:
            yield from _within(value, f"{path}.{key}" if path else key, "", 0)


def _within(value: Any, name: str, kind: str, depth: int) -> Iterator[Held]:
    if isinstance(value, Tensor):
        if isinstance(value, nn.Parameter) or (value.requires_grad and value.is_leaf):
            yield name, kind, value
    elif isinstance(value, nn.Module):
        for parameter in value.parameters():
            yield name, kind, parameter
    elif depth < _DEPTH and isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            yield from _within(inner, f"{name}[{index}]", f"a plain {type(value).__name__}", depth + 1)
    elif depth < _DEPTH and isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _within(inner, f"{name}[{key!r}]", f"a plain {type(value).__name__}", depth + 1)


class Writes(TorchDispatchMode):
    """Notes the first operator that writes to the memory of a model's parameter: which one, and who called it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._names = {
            parameter.untyped_storage().data_ptr(): name
            for name, parameter in model.named_parameters()
            if parameter.numel()
        }
        self.written: str | None = None  # the parameter's name
        self.line: str | None = None  # "model.py:31", of the first caller that is not PyTorch's

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if self.written is None and func._schema.is_mutable:
            self._look(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _look(self, func: Any, args: Sequence[Any], keywords: Mapping[str, Any]) -> None:
        given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | dict(keywords)
        for argument in func._schema.arguments:
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            for tensor in pytree.tree_leaves(given.get(argument.name)):
                if isinstance(tensor, Tensor) and tensor.numel():
                    self.written = self.written or self._names.get(tensor.untyped_storage().data_ptr())
        if self.written is not None:
            frame = sys._getframe()
            while frame.f_back is not None and not is_foreign(frame.f_code.co_filename):
                frame = frame.f_back
            self.line = f"{frame.f_code.co_filename}:{frame.f_lineno}"
