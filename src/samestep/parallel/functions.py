"""PyTorch's Python functions without the door through which a function mode takes them over."""

from collections.abc import Callable
from functools import update_wrapper
from types import FunctionType
from typing import Any


def without_override(function: Any) -> Callable[..., Any]:
    """A copy of a function of `torch.nn.functional` that a mode doesn't see, while it sees what the copy calls.

    Such a function first asks whether a mode wants it. A mode that runs its body under itself would be asked
    again, without an end.
    """
    names = {name: _nobody for name in function.__code__.co_names if name.startswith("has_torch_function")}
    copy = FunctionType(
        function.__code__, {**function.__globals__, **names}, function.__name__, function.__defaults__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return update_wrapper(copy, function)


def _nobody(*tensors: Any) -> bool:
    return False
