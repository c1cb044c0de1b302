"""Writes to parameters in a forward, also through `.data` and under no_grad, where autograd does not see them."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from samestep.parallel.exact.generators import is_foreign


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
