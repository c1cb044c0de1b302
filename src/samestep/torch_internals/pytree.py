"""Nested tuples, lists, dictionaries and registered classes as flat lists of leaves: `torch.utils._pytree`.

Models take and return any of these, and PyTorch's own wrappers (FSDP2, checkpointing) open them in the same way.
"""

from collections.abc import Callable
from typing import Any

from torch.utils._pytree import (
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_leaves_with_path,
    tree_map,
    tree_map_with_path,
    tree_unflatten,
)

__all__ = [
    "keystr",
    "tree_flatten",
    "tree_flatten_with_path",
    "tree_leaves",
    "tree_leaves_with_path",
    "tree_map_only",
    "tree_map_with_path",
    "tree_unflatten",
]


def tree_map_only(kind: type, function: Callable[[Any], Any], nest: Any) -> Any:
    """Copy a nest with `function` applied to each leaf of a type.

    A named tuple is made past its class's own `__new__`: that of PackedSequence asks a tensor for its device, and
    what stands for one may have none.
    """

    def mapped(leaf: Any) -> Any:
        if _is_named_tuple(leaf):
            return leaf._make(tree_map_only(kind, function, tuple(leaf)))
        return function(leaf) if isinstance(leaf, kind) else leaf

    return tree_map(mapped, nest, is_leaf=_is_named_tuple)


def _is_named_tuple(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_make")
