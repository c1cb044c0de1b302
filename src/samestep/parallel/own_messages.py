"""Refuses models and losses that send messages themselves.

Some libraries do so as soon as there is a process group: a mixture of experts spreads its experts over all ranks, a
contrastive loss gathers. Their gradients are then those of another computation than one process's, and their ranks
are not the layout's. It shows on ranks only, where the first step is watched: by the names that `torch.distributed`
offers, since a mode that sees every operator would change what compiles and which kernels run.
"""

import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn import functional

from samestep.errors import UserError, shown
from samestep.layout import Layout

# Not isend and irecv, which PyTorch compares with those that it was given.
_NAMES = (
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "all_to_all_single"),
    *("broadcast", "broadcast_object_list", "gather", "recv", "reduce", "reduce_scatter", "reduce_scatter_tensor"),
    *("scatter", "send"),
)
_OWN = (Path(torch.__file__).parent, Path(__file__).parent.parent)


@contextmanager
def own_messages_refused(model: nn.Module, layout: Layout) -> Iterator[None]:
    """Context in which a collective that code of others than samestep and PyTorch calls raises UserError.

    Functions that modules of the model hold, or the files of their classes have imported by name, are watched where
    some ranks have the same samples or another part of the model: such as the sums of a codebook, which its library
    takes over all ranks. Where all ranks have samples of their own they are what the library made them for.
    """
    places: list[Any] = [dist, functional]
    names = [(vars(place), name) for place in places for name in _NAMES if name in vars(place)]
    if layout.data_ranks < layout.size:
        names += _held(model, {id(place[name]) for place, name in names})
    watched = [(place, name, place[name]) for place, name in names]
    for place, name, function in watched:
        place[name] = _watched(function.__name__, function)
    try:
        yield
    finally:
        for place, name, function in watched:
            place[name] = function


def _held(model: nn.Module, functions: Collection[int]) -> list[tuple[dict[str, Any], str]]:
    """Where a model's modules and the files of their classes hold some functions, which are given by identity."""
    files = {kind.__module__ for module in model.modules() for kind in type(module).__mro__}
    own = [name for name in files if name.partition(".")[0] not in ("torch", "samestep") and name in sys.modules]
    places = [*(vars(module) for module in model.modules()), *(vars(sys.modules[name]) for name in own)]
    return [(place, name) for place in places for name, value in place.items() if id(value) in functions]


def _watched(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        frame = sys._getframe(1)
        file = Path(frame.f_code.co_filename)
        if not any(file.is_relative_to(own) for own in _OWN):
            raise UserError(
                f"the model or the loss sends messages itself ({name}, {frame.f_code.co_name} at {shown(file)}:"
                f"{frame.f_lineno}), so its ranks compute something else than one process does, and other ranks than "
                "the layout's take part; build it without, often by an argument such as is_distributed=False, and "
                "leave the ranks to the layout"
            )
        return function(*arguments, **keywords)

    return call
