"""A mode for computation in float64: tensors that a model casts to or creates in float32 become float64.

Many models compute norms, softmaxes and rotary angles in float32, whatever the dtype of their parameters. With
float64 parameters this would round to eight digits, so that a correct layout could not be distinguished from a wrong
one. Products of tensors of different dtypes may even fail. Under this mode such a model computes in float64
throughout.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from samestep.parallel.code_state import imports_alone
from samestep.parallel.exact.draws import without_override
from samestep.parallel.exact.grouped_product import grouped_product
from samestep.torch_internals.modules import read_to
from samestep.torch_internals.operators import grouped_mm

_WIDER = {
    torch.float32: torch.float64,
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.complex64: torch.complex128,
    torch.complex32: torch.complex128,
}

# Casts that have the dtype in their name.
_CASTS: dict[Any, Callable[..., Any]] = {
    Tensor.float: Tensor.double,
    Tensor.half: Tensor.double,
    Tensor.bfloat16: Tensor.double,
    Tensor.cfloat: Tensor.cdouble,  # pyright: ignore[reportAttributeAccessIssue]
    Tensor.chalf: Tensor.cdouble,  # pyright: ignore[reportAttributeAccessIssue]
}

# These copy a tensor of float32, and a model may then change the copy in place.
_COPYING: dict[Any, torch.dtype] = {
    Tensor.half: torch.float16,
    Tensor.bfloat16: torch.bfloat16,
    Tensor.double: torch.float64,
}

# Here a dtype says what the bits of memory mean, and nothing is cast.
_REINTERPRETING = {Tensor.view, torch.frombuffer}

# `module.to` reads its arguments by this function, then casts each tensor. Were float32 made float64 here already,
# the casts would look like ones from float32 to float64, which copy. Known by name: torch.compile does not trace the
# mode with the function itself in the set above.
_READS_TO = read_to.__name__

# These take on the dtype of a tensor that they are given.
_LIKE_ANOTHER = {Tensor.to, Tensor.type_as}

# Their result has the dtype of a NumPy array, where they are given one.
_FROM_DATA = {torch.tensor, torch.as_tensor, torch.asarray}

# A mode is left while a call that it answers runs; here what runs may be parts of the model. What asks the mode is
# the function of that name in PyTorch's module, which may be one that listens, put around PyTorch's own.
_BACKWARD: dict[Any, Callable[..., Any]] = {
    function: without_override(function)
    for function in (Tensor.backward, unwrap(torch.autograd.backward), torch.autograd.grad)
}

_KINDS_OF_TENSORS = ("FloatTensor", "HalfTensor", "BFloat16Tensor")


@contextmanager
def in_float64(enabled: bool = True, *, promoting: bool = False) -> Iterator[None]:
    """Compute in float64 wherever the code inside uses float32, float16 or bfloat16.

    PyTorch's default dtype is float64 meanwhile, so that `torch.zeros(n)`, or a quotient of integers, is float64 too.
    Backward must run inside as well, where it computes parts of a forward again.

    `promoting`: also what is computed from lower-precision tensors alone, for a model whose parameters are such. They
    stay as they are; autograd casts the float64 gradient that reaches one to its dtype.
    """
    if not enabled:
        yield
        return
    with imports_alone():
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            with _Float64(promoting):
                yield
        finally:
            torch.set_default_dtype(before)


class _Float64(TorchFunctionMode):
    """A mode that replaces lower-precision dtypes by float64 in all calls of PyTorch's functions."""

    def __init__(self, promoting: bool) -> None:
        super().__init__()
        self._promoting = promoting

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        keywords = dict(kwargs) if kwargs else {}
        backward = _BACKWARD.get(getattr(func, "__wrapped__", func))
        if backward is not None:
            with self:
                return backward(*args, **keywords)
        if _copies_float32(func, args, keywords):
            result = self._answer(func, args, keywords)
            # `x.half()` of a float64 tensor would be x itself under this mode, where the model expects a copy that it
            # may change.
            return result.clone() if result is args[0] else result
        return self._answer(func, args, keywords)

    def _answer(self, func: Any, args: Sequence[Any], keywords: dict[str, Any]) -> Any:
        """Call a function with float64 in place of lower-precision dtypes and tensors."""
        if func in _CASTS:
            return _CASTS[func](*args, **keywords)
        if func not in _REINTERPRETING and getattr(func, "__name__", "") != _READS_TO:
            args = tuple(map(_wider, args))
            keywords = {name: _wider(value) for name, value in keywords.items()}
        if func is Tensor.type:
            args = (args[0], *map(_wider_kind, args[1:]))
        if func in _LIKE_ANOTHER:
            args = (args[0], *map(_widened, args[1:]))
            keywords = {name: _widened(value) for name, value in keywords.items()}
        elif self._promoting and func is Tensor.dtype.__get__:  # pyright: ignore[reportAttributeAccessIssue]
            return _wider(func(*args))  # the model may cast other tensors to it
        elif (self._promoting and getattr(func, "__name__", "") != "__get__") or _is_mixed(args, keywords):
            # Such as a constant in a plain attribute of the model. A tensor that is changed in place is not replaced.
            kept = 1 if _changes_its_first(func) else 0
            args = (*args[:kept], *(_each(_widened, value) for value in args[kept:]))
            keywords = {name: value if name == "out" else _each(_widened, value) for name, value in keywords.items()}
        if func is grouped_mm and args[0].dtype == torch.float64:
            return grouped_product(*args, **keywords)
        result = func(*args, **keywords)
        return _widened(result) if func in _FROM_DATA else result


def _copies_float32(func: Any, args: Sequence[Any], keywords: Mapping[str, Any]) -> bool:
    """Whether a call casts to a dtype other than float32, which would copy its argument without this mode."""
    dtype = _COPYING.get(func)
    if func is Tensor.to or func is Tensor.type:
        dtypes = [value for value in (*args[1:], *keywords.values()) if isinstance(value, torch.dtype)]
        dtype = dtypes[0] if dtypes else None
    return dtype is not None and dtype not in (torch.float32, torch.complex64)


def _wider(value: Any) -> Any:
    """Replace a lower-precision dtype by float64; other values are returned unchanged."""
    return _WIDER.get(value, value) if isinstance(value, torch.dtype) else value


def _wider_kind(kind: Any) -> Any:
    """ "torch.DoubleTensor" for "torch.FloatTensor", or for the class of that name."""
    if isinstance(kind, torch.dtype):
        return kind
    name = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__name__}"
    place, _, own_name = name.rpartition(".")
    return f"{place}.DoubleTensor" if own_name in _KINDS_OF_TENSORS else kind


def _widened(value: Any) -> Any:
    """Cast a lower-precision tensor to float64; other values are returned unchanged."""
    if isinstance(value, Tensor) and value.dtype in _WIDER:
        return value.to(_WIDER[value.dtype])
    return value


def _is_mixed(args: Sequence[Any], keywords: Mapping[str, Any]) -> bool:
    """Whether a call has both float64 and lower-precision tensors."""
    dtypes = {tensor.dtype for tensor in _tensors((*args, *keywords.values()))}
    return not dtypes.isdisjoint(_WIDER) and not dtypes.isdisjoint((torch.float64, torch.complex128))


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    """The tensors among arguments, also in plain lists of them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):  # as torch.einsum takes them
            yield from (item for item in value if isinstance(item, Tensor))


def _each(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to a value, or to each item of a plain list."""
    if type(value) in (list, tuple):
        return type(value)(map(function, value))
    return function(value)


def _changes_its_first(func: Any) -> bool:
    """Whether a function works in place: `add_`, `__iadd__`, `__setitem__`; setters of attributes too."""
    name = getattr(func, "__name__", "")
    return name.startswith(("__i", "__set")) if name.endswith("__") else name.endswith("_")
