"""The heads of an attention module, found by the names under which modules keep them."""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from samestep.errors import LayoutError

_HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head", "heads")
_KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
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

    def check(self, name: str, parts: int) -> None:
        """Raise LayoutError where a rank would get a part of a head."""
        divisor = math.gcd(self.queries, self.keys)
        if divisor % parts:
            fits = [n for n in range(1, divisor + 1) if divisor % n == 0]
            what = f"{self.queries} heads" + (f" and {self.keys} key-value heads" * (self.keys != self.queries))
            raise LayoutError(
                f'layout "tp{parts}": {name} has {what}, which are not divisible by {parts}; '
                f"{' or '.join(f'tp{n}' for n in fits)} would do"
            )


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


def divide(module: nn.Module, heads: Heads, width: int, parts: int) -> None:
    """Make an attention module know that it has one rank's heads; `width` is that of all ranks' together."""
    expected = {
        **dict.fromkeys(_HEADS, heads.queries),
        **dict.fromkeys(_KEY_VALUE_HEADS, heads.keys),
        **dict.fromkeys(_WIDTHS, width),
    }
    for name, value in expected.items():
        if vars(module).get(name) == value:
            setattr(module, name, value // parts)
    config = vars(module).get("config")
    if config is not None:
        # Some forwards ask the configuration, which other modules share.
        config = copy.copy(config)
        for name, value in ((_HEADS[0], heads.queries), (_KEY_VALUE_HEADS[0], heads.keys)):
            if getattr(config, name, None) == value:
                setattr(config, name, value // parts)
        vars(module)["config"] = config


def _first(holder: Any, names: Sequence[str]) -> int | None:
    values = (getattr(holder, name, None) for name in names)
    return next((value for value in values if isinstance(value, int) and not isinstance(value, bool)), None)
