"""Compilation: each block compiled by itself, so that like blocks share what was compiled."""

from collections.abc import Sequence

from torch import nn

from samestep.errors import LayoutError
from samestep.layout import Layout


def check_compile(layout: Layout) -> None:
    """Raise LayoutError for what can't be compiled and still take the same step.

    A compiled block draws dropout by itself, which no look at a model can tell beforehand: the check of the task's
    contract sees it, and the engine in the first step.
    """
    if layout.pipeline > 1 or layout.context > 1 or layout.expert > 1:
        what = "blocks that exchange tokens with experts" if layout.expert > 1 else "blocks on parts of the tokens"
        what = "stages" if layout.pipeline > 1 else what
        raise LayoutError(f'layout "{layout}": {what} are not compiled yet; use run.compile: false')


def compile_blocks(blocks: Sequence[nn.Module]) -> None:
    """Compile blocks in place, at their first call."""
    for block in blocks:
        block.compile()
