"""Operators as the dispatcher sees them: modes that watch them, their schemas, and those without a public name."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import overrides
from torch._C import DisableTorchFunction, DisableTorchFunctionSubclass
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode,
    _get_current_dispatch_mode_stack,
    is_traceable_wrapper_subclass,
)

__all__ = [
    "DisableTorchFunction",  # contexts in which tensor subclasses' (and modes') `__torch_function__` isn't called
    "DisableTorchFunctionSubclass",
    "TorchDispatchMode",  # base class of modes that see every operator below autograd
    "is_traceable_wrapper_subclass",  # whether a tensor consists of others, as a DTensor does
]

_aten = torch.ops.aten


def without_modes() -> AbstractContextManager[object]:
    """Context in which no dispatch mode sees the operators."""
    return _disable_current_modes()


def innermost_mode() -> TorchDispatchMode | None:
    """The dispatch mode that sees operators first; None outside of modes."""
    return _get_current_dispatch_mode()


def active_modes() -> list[Any]:
    """The active dispatch modes, the innermost last."""
    return _get_current_dispatch_mode_stack()


@contextmanager
def without_function_modes(kind: type[TorchFunctionMode]) -> Iterator[None]:
    """Context in which function modes of a class don't see the functions; others do, in their order."""
    modes: list[TorchFunctionMode] = []
    while torch._C._len_torch_function_stack():
        modes.append(overrides._pop_mode())
    kept = [mode for mode in reversed(modes) if not isinstance(mode, kind)]
    try:
        for mode in kept:
            overrides._push_mode(mode)
        yield
    finally:
        for _ in kept:
            overrides._pop_mode()
        for mode in reversed(modes):
            overrides._push_mode(mode)


def schema(operator: Any) -> Any:
    """An operator's schema: its name with the namespace, whether it mutates, its arguments and what it returns."""
    return operator._schema


def arguments_by_name(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of an operator's call by their names in its schema; those left to their defaults are absent."""
    names = (argument.name for argument in schema(operator).arguments)
    return dict(zip(names, args, strict=False)) | dict(kwargs)


class EagerMode(TorchDispatchMode):
    """A mode in which nothing is compiled; otherwise every operator would pass another call, which says so."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


# Attention on blocks of keys and values. All give the output and the logarithm of each query's sum of exponentials.
flash_attention_for_cpu = _aten._scaled_dot_product_flash_attention_for_cpu
flash_attention_for_cpu_backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward
flash_attention = _aten._scaled_dot_product_flash_attention
flash_attention_backward = _aten._scaled_dot_product_flash_attention_backward

# The operators that `scaled_dot_product_attention` may choose.
ATTENTION_KERNELS = frozenset(
    {
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._scaled_dot_product_fused_attention_overrideable.default,  # of devices without a name in PyTorch
    }
)

grouped_mm = torch._grouped_mm  # what models call for the products of experts
to_copy = _aten._to_copy.default  # the operator of `Tensor.to`
unsafe_view = _aten._unsafe_view.default  # of products of batches; a view otherwise
