"""Turns errors that a layout causes into one sentence: the module that failed, and a layout to use instead."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from traceback import walk_tb
from types import FrameType

import torch
import torch.distributed as dist
from torch import nn

from samestep.errors import (
    HostLostError,
    InternalError,
    InterruptedJobError,
    LayoutError,
    NonFiniteError,
    RankFailedError,
    UserError,
    first_line,
    internal_line,
)
from samestep.layout import Layout

# Errors that samestep itself raises.
_OWN = (UserError, RankFailedError, InterruptedJobError, NonFiniteError, HostLostError, InternalError)

# Errors that the layout does not cause: a lost peer, and exhausted memory.
_OF_ANOTHER_STAGE = "appears to not have been used in the graph"  # of torch.autograd.grad
_PEER_LOST = re.compile(
    r"Connection (?:closed|reset|refused)|Broken pipe|remote process exited|recvValue failed|Timed? ?out"
    r"|connectFullMesh|NCCL"
)
_NO_MEMORY = re.compile(r"can't allocate memory|out of memory", re.IGNORECASE)

# What autograd says of a gradient that is asked for under no_grad().
_WITHOUT_GRAPH = "does not require grad and does not have a grad_fn"
# What DistributedDataParallel says of a parameter whose gradient comes twice.
_MARKED_TWICE = "Expected to mark a variable ready only once"

_SAMESTEP = str(Path(__file__).parents[1])
_TORCH = str(Path(torch.__file__).parent)


class LayoutFailures:
    """Converts errors of PyTorch while a model is spread, and in its first step, to LayoutError."""

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        self._model = model
        self._layout = layout
        self._names = {id(module): name for name, module in model.named_modules()}
        self._of_task: BaseException | None = None

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Context of code that depends on the layout; errors that the layout may have caused become LayoutError."""
        try:
            yield
        except Exception as error:
            if not self._is_of_layout(error):
                raise
            if (line := internal_line(error)) is not None:
                name = class_of(self._model)
                raise internal_error(self._layout, name, error, line, _other_layouts(self._layout)) from error
            failure = LayoutError(self._sentence(error))
            failure.on_every_rank = False  # other ranks may not have failed
            raise failure from error

    @contextmanager
    def of_task(self) -> Iterator[None]:
        """Context of a call of the task's own code, whose errors are not attributed to the layout."""
        try:
            yield
        except BaseException as error:
            self._of_task = error
            if self._layout.pipeline > 1 and _OF_ANOTHER_STAGE in str(error):
                raise self._slope_of_another_stage() from error
            raise

    def _slope_of_another_stage(self) -> LayoutError:
        """The error for a loss that computes gradients of the output with respect to an earlier stage."""
        pipeline, name = self._layout.pipeline, class_of(self._model)
        failure = LayoutError(
            f'layout "{self._layout}": the loss takes gradients of the output of {name} with respect to what an '
            "earlier pipeline stage has, on another rank, where no graph of the loss's reaches; use "
            f"dp{pipeline} or tp{pipeline} in place of pp{pipeline}"
        )
        failure.on_every_rank = False  # only the ranks of the last stage raise it
        return failure

    def _is_of_layout(self, error: Exception) -> bool:
        """Whether the layout may have caused an error, and not the task, a lost peer or exhausted memory."""
        return not (
            _is_one_plain_process(self._layout)
            or isinstance(error, (*_OWN, OSError, MemoryError, dist.DistError, torch.OutOfMemoryError))
            or error is self._of_task
            or _PEER_LOST.search(str(error))
            or _NO_MEMORY.search(str(error))
        )

    def _sentence(self, error: Exception) -> str:
        """Describe the failure, its place in the model and in the user's code, and a layout that requires less."""
        if _MARKED_TWICE in str(error):
            return (
                f'layout "{self._layout}": the backward of {class_of(self._model)} runs another one inside, as '
                "torch.utils.checkpoint does with use_reentrant=True, and gradients are averaged once a backward; "
                f"use {instead_of_reentrant(self._layout)}"
            )
        names = self._names | {id(module): name for name, module in self._model.named_modules()}
        where = failing_module(error, names)
        module = self._model.get_submodule(where) if where else self._model
        what = f"{where} ({class_of(module)})" if where else class_of(module)
        line = foreign_line(error)
        at = f", {line}" if line else ""
        if _WITHOUT_GRAPH in str(error):
            return (
                f'layout "{self._layout}": {what} takes gradients in its forward, which also runs without a '
                f"backward, under torch.no_grad() ({type(error).__name__}: {first_line(error)}{at}); use "
                "torch.enable_grad() around what they are computed from"
            )
        return (
            f'layout "{self._layout}": {what} fails when the model is spread so '
            f"({type(error).__name__}: {first_line(error)}{at}); use {_other_layouts(self._layout)}"
        )


def internal_error(layout: Layout | None, model: str, error: Exception, line: str, other: str) -> InternalError:
    """The error for a mistake in samestep's own code: where it is, what to report, and what to use until then."""
    under = f' layout "{layout}" to' if layout is not None else ""
    return InternalError(
        f"samestep itself failed at {line} when it applied{under} {model} ({type(error).__name__}: "
        f"{first_line(error)}); the model is not to blame: please report this traceback, with the class of the model "
        f"and the versions of samestep and PyTorch ({torch.__version__}); until it is mended, use {other}"
    )


def instead_of_reentrant(layout: Layout) -> str:
    """What to use in place of `torch.utils.checkpoint` with use_reentrant=True."""
    return (
        "checkpoint(..., use_reentrant=False), or in place of the model's own checkpointing "
        f'"{replace(layout, recompute="full")}"'
    )


def failing_module(error: BaseException, names: Mapping[int, str]) -> str:
    """The name of the innermost module whose code raised an error; `names`: of modules, by id."""
    owners = (id(frame.f_locals.get("self")) for frame, _ in walk_tb(error.__traceback__))
    inside = [names[owner] for owner in owners if owner in names]
    return inside[-1] if inside else ""


def foreign_line(error: BaseException) -> str | None:
    """The innermost line that is neither samestep's nor PyTorch's, as "model.py:31"."""
    lines = [(frame, line) for frame, line in walk_tb(error.__traceback__) if _is_foreign(frame)]
    return f"{Path(lines[-1][0].f_code.co_filename).name}:{lines[-1][1]}" if lines else None


def _is_foreign(frame: FrameType) -> bool:
    """Whether a line is neither samestep's nor PyTorch's."""
    return not frame.f_code.co_filename.startswith((_SAMESTEP, _TORCH))


def class_of(module: nn.Module) -> str:
    """The name of a module's class as the model's author gave it; FSDP2 puts a class of its own before it."""
    return type(module).__name__.removeprefix("FSDP")


def _is_one_plain_process(layout: Layout) -> bool:
    return layout.size == 1 and not _has_options(layout)


def _has_options(layout: Layout) -> bool:
    return layout.recompute != "none" or layout.offload != "none"


def _other_layouts(layout: Layout) -> str:
    """A layout for the same number of processes that requires less of a model."""
    if _has_options(layout):
        return f'"{replace(layout, recompute="none", offload="none")}"'
    if layout.zero >= 2 or layout.cuts_model:
        return f"dp{layout.size}, which leaves the model whole on every rank"
    return "one process"
