"""Findings: what the first of the ranks that are rehearsed one after the other has found out about their model.

Ranks of one pipeline build the same model and follow the same example, of a Llama of 80 layers for seconds each time.
What that tells is the same for all of them. Ranks that run find out by themselves, each for its own.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from samestep.parallel.calls import Trace


@dataclass(frozen=True, kw_only=True)
class Slices:
    """With which modules left whole a sliced model has given the output of the whole one."""

    whole: Mapping[str, str]  # module -> why
    by_head: Collection[str]  # columns that are laid out head by head
    able: bool  # whether logits can stay in slices


@dataclass(frozen=True, kw_only=True)
class Findings:
    """Filled by the first rank, and read by the others."""

    traces: list[Trace] = field(default_factory=list)  # none or one
    slices: dict[Sequence[Any], Slices] = field(default_factory=dict)  # by the lists whose tokens are split
