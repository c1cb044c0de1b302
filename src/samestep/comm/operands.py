"""Operands: the tensors among what an operator takes or gives.

Operators have tensors, and lists of them, in their arguments. Modes that look at every operator of a step look here,
many times faster than PyTorch's walkers of any nest do.
"""

from typing import Any

from torch import Tensor


def operands(*arguments: Any) -> list[Tensor]:
    """The tensors of an operator's arguments or results, also in lists and dictionaries, in their order."""
    found: list[Tensor] = []
    for each in arguments:
        if isinstance(each, Tensor):
            found.append(each)
        elif isinstance(each, (list, tuple)):
            found += operands(*each)
        elif isinstance(each, dict):
            found += operands(*each.values())
    return found
