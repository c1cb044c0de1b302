"""Refuses models whose backward runs a backward of their own, as reversible layers do.

Such a backward takes modules of several blocks again, in its own order, whole and without what a layout has put
around them. PyTorch's own checkpointing, which does so too, is known to layouts, and is passed over.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import autograd, nn
from torch.autograd.function import BackwardCFunction

from samestep.errors import LayoutError, shown
from samestep.layout import Layout
from samestep.parallel.layout_failure import class_of

_FUNCTIONS_BACKWARD = BackwardCFunction.apply.__code__
_OWN = (Path(torch.__file__).parent, Path(__file__).parent.parent)


@contextmanager
def own_backwards_refused(model: nn.Module, layout: Layout) -> Iterator[None]:
    """Context of a step in which a backward that the model's code runs inside of the step's raises LayoutError."""
    if layout.size == 1:
        yield
        return
    backward = autograd.backward

    @wraps(backward)  # by which it is known to what answers calls of PyTorch's
    def watched(*arguments: Any, **keywords: Any) -> None:
        if _in_backward():
            _check_caller(model, layout)
        backward(*arguments, **keywords)

    autograd.backward = watched
    try:
        yield
    finally:
        autograd.backward = backward


def _in_backward() -> bool:
    """Whether this is called from the backward of an autograd.Function, however that was started."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code is not _FUNCTIONS_BACKWARD:
        frame = frame.f_back
    return frame is not None


def _check_caller(model: nn.Module, layout: Layout) -> None:
    """Raise LayoutError where the code that calls backward isn't PyTorch's or samestep's."""
    frame: Any = sys._getframe(2)
    # A tensor's `backward` and modes that answer for it stand between.
    while any(Path(frame.f_code.co_filename).is_relative_to(own) for own in _OWN):
        if frame.f_code is _FUNCTIONS_BACKWARD:
            return
        frame = frame.f_back
    file = Path(frame.f_code.co_filename)
    failure = LayoutError(
        f'layout "{layout}": the backward of {class_of(model)} runs another one inside ({frame.f_code.co_name} at '
        f"{shown(file)}:{frame.f_lineno}), as reversible layers do, which takes modules of several blocks again, "
        "whole and past what the layout puts around them; use one process, or the model without its reversible layers"
    )
    failure.on_every_rank = False  # the ranks of other stages may run none
    raise failure
