"""What goes wrong below a layout, told in one sentence: which module of the model failed, and which layout to use."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from traceback import walk_tb
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from samestep.errors import (
    HostLostError,
    InterruptedJobError,
    LayoutError,
    NonFiniteError,
    RankFailedError,
    UserError,
)
from samestep.layout import Layout
from samestep.parallel.trace import first_line

# What samestep itself raises.
_OWN = (UserError, RankFailedError, InterruptedJobError, NonFiniteError, HostLostError)

# What is no fault of the layout: a peer that is gone, and memory that is used up.
_PEER_LOST = re.compile(
    r"Connection (?:closed|reset|refused)|Broken pipe|remote process exited|recvValue failed|Timed? ?out"
    r"|connectFullMesh|NCCL"
)
_NO_MEMORY = re.compile(r"can't allocate memory|out of memory", re.IGNORECASE)

_SAMESTEP = str(Path(__file__).parents[1])
_TORCH = str(Path(torch.__file__).parent)


class LayoutFailures:
    """Turns what PyTorch raises while a model is spread, and in its first step, into a LayoutError."""

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        self._model = model
        self._layout = layout
        self._names = {id(module): name for name, module in model.named_modules()}
        self._of_task: BaseException | None = None

    @contextmanager
    def told(self) -> Iterator[None]:
        """Code that a layout of one process would not run so."""
        try:
            yield
        except Exception as error:
            if not self._is_of_layout(error):
                raise
            failure = LayoutError(self._sentence(error))
            failure.alike = False  # it may have come on this rank alone
            raise failure from error

    def of_task(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function of the task's, whose errors are the task's own."""

        def run(*arguments: Any, **keywords: Any) -> Any:
            try:
                return function(*arguments, **keywords)
            except BaseException as error:
                self._of_task = error
                raise

        return run

    def _is_of_layout(self, error: Exception) -> bool:
        return not (
            _is_one_plain_process(self._layout)
            or isinstance(error, (*_OWN, OSError, MemoryError, dist.DistError, torch.OutOfMemoryError))
            or error is self._of_task
            or _PEER_LOST.search(str(error))
            or _NO_MEMORY.search(str(error))
        )

    def _sentence(self, error: Exception) -> str:
        names = self._names | {id(module): name for name, module in self._model.named_modules()}
        frames = [frame for frame, _ in walk_tb(error.__traceback__)]
        lines = [(frame, line) for frame, line in walk_tb(error.__traceback__)]
        inside = [names[id(owner)] for frame in frames if id(owner := frame.f_locals.get("self")) in names]
        where = inside[-1] if inside else ""
        module = self._model.get_submodule(where) if where else self._model
        own = [f"{Path(frame.f_code.co_filename).name}:{line}" for frame, line in lines if _is_foreign(frame)]
        what = f"{where} ({_class_of(module)})" if where else _class_of(module)
        at = f", {own[-1]}" if own else ""
        return (
            f'layout "{self._layout}": {what} fails when the model is spread so '
            f"({type(error).__name__}: {first_line(error)}{at}); use {_other_layouts(self._layout)}"
        )


def _is_foreign(frame: FrameType) -> bool:
    """Whether a line is neither samestep's nor PyTorch's."""
    return not frame.f_code.co_filename.startswith((_SAMESTEP, _TORCH))


def _class_of(module: nn.Module) -> str:
    """The name of a module's class as the model's author gave it; FSDP2 puts a class of its own before it."""
    return type(module).__name__.removeprefix("FSDP")


def _is_one_plain_process(layout: Layout) -> bool:
    return layout.size == 1 and not _has_options(layout)


def _has_options(layout: Layout) -> bool:
    return layout.recompute != "none" or layout.offload != "none"


def _other_layouts(layout: Layout) -> str:
    """A layout for as many processes that asks less of a model."""
    if _has_options(layout):
        return f'"{replace(layout, recompute="none", offload="none")}"'
    if layout.zero >= 2 or layout.cuts_model:
        return f"dp{layout.size}, which leaves the model whole on every rank"
    return "one process"
