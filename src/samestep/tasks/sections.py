"""Keys of a task's section that exclude each other, or must divide each other."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_core import ArgsKwargs


def refuse_together(given: Any, key: str, others: Sequence[str], reason: str) -> Any:
    """For a "before" validator: raise ValueError where `key` is given with one of `others`, else return `given`.

    Only here can a value that the user gave be told from a default.
    """
    values = given.kwargs if isinstance(given, ArgsKwargs) else given
    if isinstance(values, Mapping) and values.get(key) is not None:
        for other in others:
            if values.get(other) is not None:
                raise ValueError(f"{key} and {other} are both given; {other} {reason}")
    return given


def check_heads(hidden: int, heads: int) -> None:
    """For an "after" validator: raise ValueError where the hidden size can't be divided among the heads."""
    if hidden % heads:
        fitting = [str(count) for count in range(1, hidden + 1) if hidden % count == 0]
        raise ValueError(
            f"hidden is {hidden} and heads is {heads}; hidden must be divisible by heads, so heads of "
            f"{', '.join(fitting)} would do"
        )
