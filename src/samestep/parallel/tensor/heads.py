"""The heads of an attention module, found by the names under which modules keep them."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

_HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head", "heads")
_KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
_GROUPS = ("num_key_value_groups", "num_kv_groups", "n_rep")  # query heads of one key-value head
# What forwards reshape and split by: the width of all heads together.
_WIDTHS = ("all_head_size", "inner_dim", "split_size")


@dataclass(frozen=True, kw_only=True)
class Heads:
    """How many heads an attention has, and how many of keys and values (Ainslie et al. 2023)."""

    queries: int
    keys: int

    def pieces(self, columns: Sequence[int], row: int) -> list[list[int]] | None:
        """The heads in each fused piece of the columns, of given widths, before a row layer of a given input width.

        Queries, keys and values may be in linears of their own or one after the other in one. None where the
        widths are not those of queries, keys and values.
        """
        head, rest = divmod(row, self.queries)
        if rest:
            return None
        choices = [[self.queries], [self.keys], [self.keys] * 2, [self.queries, self.keys, self.keys]]
        found = [next((c for c in choices if sum(c) * head == width), None) for width in columns]
        pieces = [piece for piece in found if piece is not None]
        whole = len(pieces) == len(columns) and sum(map(sum, pieces)) == self.queries + 2 * self.keys
        return pieces if whole else None

    def why_whole(self, parts: int) -> str | None:
        """Why ranks can't have heads of their own; None where they can, perhaps with keys and values in common."""
        if self.queries % parts == 0 and (self.keys % parts == 0 or self.queries % self.keys == 0):
            return None
        what = f"{self.queries} heads" + (f" and {self.keys} key-value heads" * (self.keys != self.queries))
        return f"has {what}, which {parts} ranks can't share out"

    def shares_keys(self, parts: int) -> bool:
        """Whether ranks need the same key-value heads, since there are too few of them to share out."""
        return self.keys % parts != 0

    def keys_of(self, rank: int, parts: int) -> list[int]:
        """The key-value heads that a rank's queries attend to, one for as many consecutive queries each."""
        mine = self.queries // parts
        needed = [query * self.keys // self.queries for query in range(rank * mine, (rank + 1) * mine)]
        each = list(dict.fromkeys(needed))
        # Where queries of one head are on two ranks, some heads have fewer queries here; then each query has its own.
        even = mine % len(each) == 0 and [head for head in each for _ in range(mine // len(each))] == needed
        return each if even else needed


def heads_of(module: nn.Module) -> Heads | None:
    """The heads of a module that is an attention; None for any other."""
    own = _first(module, _HEADS)
    config = getattr(module, "config", None)
    if own is None and "attention" not in type(module).__name__.lower():
        return None
    queries = own or _first(config, _HEADS)
    if queries is None:
        return None
    keys = _first(module, _KEY_VALUE_HEADS) or _first(config, _KEY_VALUE_HEADS) or queries
    return Heads(queries=queries, keys=keys)


def divide(module: nn.Module, heads: Heads, width: int, rank: int, parts: int) -> None:
    """Make an attention module know that it has one rank's heads; `width` is that of all ranks' together."""
    queries = heads.queries // parts
    keys = len(heads.keys_of(rank, parts)) if heads.shares_keys(parts) else heads.keys // parts
    local = {
        **dict.fromkeys(_HEADS, (heads.queries, queries)),
        **dict.fromkeys(_KEY_VALUE_HEADS, (heads.keys, keys)),
        **dict.fromkeys(_GROUPS, (heads.queries // heads.keys, queries // keys)),
        **dict.fromkeys(_WIDTHS, (width, width // parts)),
    }
    for name, (whole, mine) in local.items():
        if vars(module).get(name) == whole:
            setattr(module, name, mine)
    config = vars(module).get("config")
    if config is not None:
        # Some forwards ask the configuration, which other modules share.
        config = copy.copy(config)
        for name in (_HEADS[0], _KEY_VALUE_HEADS[0]):
            whole, mine = local[name]
            if getattr(config, name, None) == whole:
                setattr(config, name, mine)
        vars(module)["config"] = config


def _first(holder: Any, names: Sequence[str]) -> int | None:
    values = (getattr(holder, name, None) for name in names)
    return next((value for value in values if isinstance(value, int) and not isinstance(value, bool)), None)
