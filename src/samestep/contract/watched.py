"""One training forward and its loss, watched for all that the contract asks of a forward."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from samestep.contract.second_gradients import GradientCall, GradientCalls
from samestep.contract.step import first_loss
from samestep.contract.trial import Trial, Writes
from samestep.parallel.exact.generators import State, seedings_taken_back, state
from samestep.torch_internals import pytree
from samestep.torch_internals.operators import TorchDispatchMode

_DETACH = torch.ops.aten.detach.default


class Asking(TorchDispatchMode):
    """Notes whether code asks for values that depend on trained parameters: numbers, or the sizes of results."""

    def __init__(self) -> None:
        super().__init__()
        self.asks = False
        self._depending: dict[int, Tensor] = {}  # results without a graph: comparisons, and what is detached

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.asks:
            given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            with_graph = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given)
            if with_graph or any(tensor.requires_grad or id(tensor) in self._depending for tensor in given):
                self._note(func, result, with_graph)
        return result

    def _note(self, func: Any, result: Any, with_graph: bool) -> None:
        """Record an operator's result that depends on parameters."""
        self.asks = isinstance(result, (bool, int, float)) or torch.Tag.dynamic_output_shape in func.tags
        kept = with_graph and func is not _DETACH
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor) and not (kept and leaf.is_floating_point()):
                self._depending[id(leaf)] = leaf


@dataclass(frozen=True, kw_only=True)
class Watched:
    """A loss of the first samples, with its graph, and what computing it did besides."""

    total: Tensor  # 0-dim
    count: float
    writes: Writes  # to parameters
    gradient_calls: Sequence[GradientCall]  # of torch.autograd.grad; empty unless asked for
    asking: Asking  # for values that depend on parameters
    generators: tuple[State, State]  # of random numbers: their states before it and after it


def watch(trial: Trial, *, gradient_calls: bool) -> Watched:
    """Take a training forward and loss of all samples of a trial.

    `gradient_calls`: also record calls of torch.autograd.grad. The modules that draw are in `trial.dropout.answered`.
    """
    calls = GradientCalls()
    trial.dropout.notes = True
    trial.listener = calls if gradient_calls else nullcontext()
    try:
        before = state(trial.device)
        with seedings_taken_back(trial.device), Writes(trial.model) as writes, Asking() as asking:
            total, count = first_loss(trial)
        states = before, state(trial.device)
    finally:
        trial.dropout.notes = False
        trial.listener = nullcontext()
    return Watched(
        total=total, count=count, writes=writes, gradient_calls=calls.taken, asking=asking, generators=states
    )
