"""Nested tuples, lists, dictionaries and registered classes as flat lists of leaves: `torch.utils._pytree`.

Models take and return any of these, and PyTorch's own wrappers (FSDP2, checkpointing) open them in the same way.
"""

from torch.utils._pytree import (
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_leaves_with_path,
    tree_map_only,
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
