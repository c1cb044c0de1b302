"""Gradients of gradients: whether a task takes gradients through the layers that its layout cuts apart.

A gradient penalty calls torch.autograd.grad in the loss or in the forward, and backward then runs a second time
through what was between. Some layouts can't have that for the layers that ranks share out; which ones, and why,
stands in `_LIMITS`. It is found in one forward and loss, before any rank starts.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from samestep.contract.errors import line_of
from samestep.contract.trial import Trial
from samestep.errors import LayoutError
from samestep.layout import Layout
from samestep.parallel.blocks import find_blocks, with_forward
from samestep.torch_internals import pytree


@dataclass(frozen=True, kw_only=True)
class _Limit:
    """A restriction of some layouts on gradients taken through blocks."""

    of: Callable[[Layout], bool]
    twice: bool  # True: refuse only gradients that are differentiated again; False: all
    first: bool  # refuse only gradients through the first block, which is not on the loss's rank
    why: str
    use: Callable[[Layout], str]


_NO_SECOND = "the messages between whose ranks have a gradient, but no gradient of that"
_LIMITS = (
    _Limit(
        of=lambda layout: layout.zero >= 2,
        twice=False,
        first=False,
        why="whose parameters are sharded and freed after one backward, while a gradient of these gradients needs "
        "them again",
        use=lambda layout: f"dp{layout.size}, or zero1x{layout.size}",
    ),
    _Limit(
        of=lambda layout: layout.pipeline > 1,
        twice=False,
        first=True,
        why="with respect to what an earlier pipeline stage has, on another rank, where no graph of the loss's "
        "reaches",
        use=lambda layout: f"dp{layout.pipeline} or tp{layout.pipeline} in place of pp{layout.pipeline}",
    ),
    _Limit(
        of=lambda layout: layout.context > 1,
        twice=True,
        first=False,
        why=_NO_SECOND,
        use=lambda layout: f"dp{layout.context} or tp{layout.context} in place of cp{layout.context}",
    ),
    _Limit(
        of=lambda layout: layout.sequence == "split",
        twice=True,
        first=False,
        why=_NO_SECOND,
        use=lambda _: "sequence=whole",
    ),
)


@dataclass(frozen=True)
class GradientCall:
    """One call of torch.autograd.grad."""

    outputs: Sequence[Tensor]
    inputs: Sequence[Tensor]
    twice: bool


class GradientCalls(TorchFunctionMode):
    """Records the calls of torch.autograd.grad."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[GradientCall] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.autograd.grad:
            outputs, inputs = (
                [leaf for leaf in pytree.tree_leaves(nest) if isinstance(leaf, Tensor)]
                for nest in (args[0], args[1] if len(args) > 1 else kwargs.get("inputs"))
            )
            self.taken.append(GradientCall(outputs, inputs, bool(kwargs.get("create_graph"))))
        return func(*args, **kwargs)


@dataclass(frozen=True, kw_only=True)
class GradientThroughBlocks:
    """A gradient that a task takes through blocks of its model with torch.autograd.grad."""

    blocks: Sequence[str]  # names and classes, in their order
    first: bool  # whether the model's first block is among them
    twice: bool  # whether it is differentiated again
    loss: str  # which loss, and where it stands


def gradients_passed(trial: Trial) -> list[GradientThroughBlocks]:
    """Record the gradients that one forward and loss of a task take through blocks."""
    with GradientCalls() as calls:
        trial.loss(0, len(trial.sampled))
    return through_blocks(trial, calls.taken)


def through_blocks(trial: Trial, calls: Sequence[GradientCall]) -> list[GradientThroughBlocks]:
    """Select the calls of torch.autograd.grad, recorded in a forward and loss, that go through the model's blocks."""
    blocks = with_forward(find_blocks(trial.model))
    names = {id(module): name for name, module in trial.model.named_modules()}
    turn = "" if trial.turn is None else f" of turn {trial.turn.name}"
    passes = []
    for taken in calls:
        if passed := _blocks_between(taken, blocks):
            passes.append(
                GradientThroughBlocks(
                    blocks=[f"{names[id(block)]} ({type(block).__name__})" for block in passed],
                    first=passed[0] is blocks[0],
                    twice=taken.twice,
                    loss=f"the loss{turn}{line_of(trial.loss_function)}",
                )
            )
    return passes


def can_lack_gradients(layout: Layout, engine: Any) -> bool:
    """Whether a layout restricts gradients taken through blocks."""
    return engine == "native" and any(limit.of(layout) for limit in _LIMITS)


def check_second_gradients(passed: Sequence[GradientThroughBlocks], layout: Layout, engine: Any) -> None:
    """Raise LayoutError for a gradient through blocks that the layout doesn't support."""
    if engine != "native":
        return
    for limit in (limit for limit in _LIMITS if limit.of(layout)):
        for passed_on in passed:
            if (passed_on.twice or not limit.twice) and (passed_on.first or not limit.first):
                raise LayoutError(
                    f'layout "{layout}": {passed_on.loss} takes gradients through {passed_on.blocks[0]}, '
                    f"{limit.why}; use {limit.use(layout)}"
                )


def _blocks_between(taken: GradientCall, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the blocks with parameters on the graph's paths from the outputs to the inputs, in their order."""
    owner = {id(parameter): block for block in blocks for parameter in block.parameters()}
    leaves = {id(input_) for input_ in taken.inputs if input_.grad_fn is None}
    ends = {input_.grad_fn for input_ in taken.inputs if input_.grad_fn is not None}
    identities: set[int] = set()
    between = _between([output.grad_fn for output in taken.outputs], leaves, ends)
    for node in between:
        for before, _ in node.next_functions:
            parameter = _parameter_behind(before) if before not in between else None
            if parameter is not None and id(parameter) in owner:
                identities.add(id(owner[id(parameter)]))
    # A gradient with respect to a block's parameter passes through that block.
    identities |= {id(owner[leaf]) for leaf in leaves if leaf in owner}
    return [block for block in blocks if id(block) in identities]


def _between(roots: Sequence[Any], leaves: set[int], ends: set[Any]) -> set[Any]:
    """The nodes of a graph from which an end, or the gradient of a leaf, is reached. Ends are not among them."""
    reaches: dict[Any, bool] = {}
    waiting: list[tuple[Any, bool]] = [(root, False) for root in roots if root is not None]
    while waiting:
        node, seen = waiting.pop()
        following = [before for before, _ in node.next_functions if before is not None]
        if seen:
            reaches[node] = any(before in ends or reaches.get(before, False) for before in following)
        elif node not in reaches:
            reaches[node] = _is_leaf(node, leaves)
            if node in ends or reaches[node]:
                continue
            waiting.append((node, True))
            waiting += [(before, False) for before in following if before not in reaches]
    return {node for node, reached in reaches.items() if reached and not _is_leaf(node, leaves)}


def _is_leaf(node: Any, leaves: set[int]) -> bool:
    return id(getattr(node, "variable", None)) in leaves


def _parameter_behind(node: Any) -> Tensor | None:
    """Return the parameter that an operator takes directly or through views and casts only; else None."""
    while node is not None and not hasattr(node, "variable"):
        before: Iterator[Any] = (function for function, _ in node.next_functions if function is not None)
        node, more = next(before, None), next(before, None)
        if more is not None:
            return None
    return None if node is None else node.variable
