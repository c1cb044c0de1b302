"""Compilation: each block is compiled separately, so that like blocks share compiled code.

Code that is not part of one block stays uncompiled: the communication of parameters and gradients, and the messages
between pipeline stages. Under context parallel the exchange of tokens in attention (parallel/context) is a graph
break, with one graph before attention and one after it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from samestep.errors import LayoutError
from samestep.launch import compiler_cache
from samestep.layout import Layout
from samestep.parallel.attributes import wrap_innermost
from samestep.parallel.pipeline.schedule import SCHEDULES
from samestep.parallel.recompute import selectively


def check_compile(layout: Layout) -> None:
    """Raise LayoutError for what can't be compiled and still take the same step.

    A compiled block draws dropout by itself, which no look at a model can tell beforehand: the check of the task's
    contract sees it, and the engine in the first step.
    """
    if layout.expert > 1:
        raise LayoutError(
            f'layout "{layout}": blocks that exchange tokens with experts are not compiled yet; use '
            "run.compile: false"
        )
    if layout.pipeline > 1 and SCHEDULES[layout.schedule].splits_backward:
        raise LayoutError(
            f'layout "{layout}": schedule {layout.schedule} computes gradients of inputs and of weights apart, and '
            "the backward of a compiled block gives both at once; use schedule=1f1b, or run.compile: false"
        )


def compile_blocks(blocks: Sequence[nn.Module], *, recomputing: bool) -> None:
    """Compile the blocks' forwards in place, at their first call; `recomputing`: with selective recomputation.

    Wrappers of a block's forward are not compiled.
    """
    compiler_cache.avoid_foreign_headers()
    what = selectively if recomputing else _itself
    for block in blocks:
        wrap_innermost(block, torch.compile(what))


def _itself(forward: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    return forward(*arguments, **keywords)
