"""Parameters that lie where PyTorch doesn't look for them: in lists, dictionaries and plain attributes."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

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
