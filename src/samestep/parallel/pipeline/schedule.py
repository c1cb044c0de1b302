"""Schedules: which rank holds which stage, how many micro-batches a step has, and the order of a rank's actions.

The one file that touches PyTorch's own pipelining.

For p ranks and m micro-batches (F: forward, B: backward; one row a rank, time to the right):

    gpipe, p = 2, m = 3        F0 F1 F2 .  .  B0 B1 B2         activations of m micro-batches are kept
                               .  F0 F1 F2 B0 B1 B2 .
    1f1b, p = 2, m = 3         F0 F1 .  B0 F2 B1 .  B2         of at most p - rank
                               .  F0 B0 F1 B1 F2 B2 .

(in units in which a forward and a backward take equally long). Zero-bubble schedules cut a backward into I (gradients
of inputs, for which the stage before waits) and W (those of weights, for which nobody does), and run W where a rank
would wait (Qi et al. 2023, arXiv 2401.10241).
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from samestep.errors import LayoutError
from samestep.layout import Layout
from samestep.torch_internals.autograd import backward_of_inputs, backward_of_weights
from samestep.torch_internals.tensors import is_view


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Properties of a schedule."""

    most_stages: int | None = None  # maximum number of stages a rank; None: any
    in_rounds: bool = False  # the number of micro-batches must be a multiple of the pipeline ranks
    turns: bool = False  # the second half of the stages is on the ranks in reverse order, like a V
    splits_backward: bool = False  # computes gradients of weights separately, when a rank would be idle


SCHEDULES: Mapping[str, Rules] = {
    "gpipe": Rules(most_stages=1),
    "1f1b": Rules(most_stages=1),
    "interleaved-1f1b": Rules(in_rounds=True),
    "interleaved-zero-bubble": Rules(in_rounds=True, splits_backward=True),
    "zbv-zero-bubble": Rules(most_stages=2, turns=True, splits_backward=True),
}


def owners(layout: Layout) -> list[int]:
    """The pipeline rank of each stage."""
    return _owners(layout.schedule, layout.pipeline, layout.stages_a_rank)


def _owners(schedule: str, ranks: int, stages_a_rank: int) -> list[int]:
    line = list(range(ranks))
    if SCHEDULES[schedule].turns:
        return line + line[::-1]
    return line * stages_a_rank


def micro_batches(layout: Layout, batch: int, micro_batch: int | None, *, undivided: bool = False) -> int | None:
    """The number of micro-batches of every step, the same on every rank; None: it depends on the samples.

    A pipeline's schedule is made for one number of micro-batches. In steps with fewer samples, some have zero weight.
    `undivided`: one, unless `micro_batch` asks for more, for models that need a rank's samples in one forward.
    """
    if layout.pipeline == 1:
        return None
    samples = -(-batch // layout.data_ranks)
    if undivided and micro_batch is None:
        return 1
    # With 2 p micro-batches, p - 1 of 3 p - 1 slots are idle: a third at most.
    count = -(-samples // micro_batch) if micro_batch else min(2 * layout.pipeline, samples)
    # With fewer micro-batches than ranks some stage would always be idle; those without samples have zero weight.
    count = max(count, layout.pipeline)
    if SCHEDULES[layout.schedule].in_rounds:
        # Interleaved stages take the micro-batches in rounds of as many as there are ranks (Narayanan et al. 2021,
        # section 2.2.2).
        count = -(-count // layout.pipeline) * layout.pipeline
    return count


def check(layout: Layout) -> None:
    """Raise LayoutError for what pipelines can't do. For layouts without one nothing is wrong."""
    if layout.pipeline == 1:
        return
    rules = SCHEDULES[layout.schedule]
    if rules.most_stages is not None and layout.stages_a_rank > rules.most_stages:
        fix = (
            "use schedule=interleaved-1f1b"
            if rules.most_stages == 1
            else f"{rules.most_stages * layout.pipeline} stages over {layout.pipeline} ranks are what it is made for"
        )
        raise LayoutError(
            f'layout "{layout}": schedule {layout.schedule} runs {rules.most_stages} '
            f"stage{'s' if rules.most_stages > 1 else ''} a rank, not {layout.stages}; {fix}"
        )
    if layout.context > 1 and layout.tensor > 1 and layout.sequence == "split":
        raise LayoutError(
            f'layout "{layout}": tokens are split twice, and a stage learns how many there are before the first '
            "split alone; use sequence=whole, or a layout without pp or cp"
        )
    if rules.splits_backward:
        _check_split(layout)


def _check_split(layout: Layout) -> None:
    """Raise LayoutError for options that don't support a split backward, as hooks only see its first half."""
    if layout.zero >= 2:
        raise LayoutError(
            f'layout "{layout}": schedule {layout.schedule} computes gradients of inputs and of weights apart, and '
            "shards of parameters would be put away in between; use zero1, or schedule=1f1b"
        )
    if layout.recompute != "none":
        raise LayoutError(
            f'layout "{layout}": schedule {layout.schedule} computes gradients of inputs and of weights apart, and '
            f"recompute={layout.recompute} would compute every block again for each; use schedule=1f1b"
        )


Kind = Literal["F", "B", "I", "W"]  # forward, backward, and backward's two halves: of inputs, of weights


@dataclass(frozen=True, kw_only=True)
class Action:
    """One forward or backward of one micro-batch in one stage."""

    stage: int
    kind: Kind
    micro_batch: int


Orders = Sequence[Sequence[Action]]  # of each pipeline rank


@lru_cache(maxsize=8)
def orders_of(schedule: str, *, ranks: int, stages_a_rank: int, micro_batches: int) -> Orders:
    """The actions of every rank. The schedule must support the number of micro-batches."""
    if micro_batches == 1:
        return _stage_by_stage(_owners(schedule, ranks, stages_a_rank))
    if schedule == "1f1b":
        return [_one_forward_one_backward(rank, ranks, micro_batches) for rank in range(ranks)]
    from torch.distributed import pipelining

    name, one_stage = _SCHEDULES[schedule]
    stages = [
        # The attributes that a schedule reads before it runs.
        SimpleNamespace(
            stage_index=index * ranks,
            num_stages=ranks * stages_a_rank,
            group_size=ranks,
            group_rank=0,
            is_first=index == 0,
            submod=None,
            has_backward=True,
        )
        for index in range(stages_a_rank)
    ]
    made: Any = getattr(pipelining, name)(stages[0] if one_stage else stages, micro_batches)
    return [_plain(made.pipeline_order[rank]) for rank in range(ranks)]


_SCHEDULES = {
    "gpipe": ("ScheduleGPipe", True),
    "interleaved-1f1b": ("ScheduleInterleaved1F1B", False),
    "interleaved-zero-bubble": ("ScheduleInterleavedZeroBubble", False),
    "zbv-zero-bubble": ("ScheduleZBVZeroBubble", False),
}


def _stage_by_stage(rank_of: Sequence[int]) -> list[list[Action]]:
    """The order of one micro-batch, under any schedule: the stages forwards, and backwards in reverse."""
    orders: list[list[Action]] = [[] for _ in set(rank_of)]
    for stage, rank in enumerate(rank_of):
        orders[rank].append(Action(stage=stage, kind="F", micro_batch=0))
    for stage, rank in reversed([*enumerate(rank_of)]):
        orders[rank].append(Action(stage=stage, kind="B", micro_batch=0))
    return orders


def _one_forward_one_backward(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    """1F1B (Narayanan et al. 2021, section 2.2). PyTorch's own table of it counts the last rank's forwards from 1."""
    ahead = min(ranks - 1 - rank, micro_batches)  # forwards before the first backward
    order = [Action(stage=rank, kind="F", micro_batch=number) for number in range(ahead)]
    for number in range(micro_batches):
        if ahead + number < micro_batches:
            order.append(Action(stage=rank, kind="F", micro_batch=ahead + number))
        order.append(Action(stage=rank, kind="B", micro_batch=number))
    return order


def _plain(actions: Sequence[Any]) -> list[Action]:
    """Convert PyTorch's actions, without idle slots and messages, which follow from the order."""
    order: list[Action] = []
    for action in actions:
        if action is None or action.computation_type.value not in ("F", "B", "I", "W"):
            continue
        kind, stage, micro_batch = action.computation_type.value, action.stage_index, action.microbatch_index
        # The first stage has no input gradient: it runs one whole backward in place of W.
        if stage == 0 and kind in ("I", "W"):
            if kind == "I":
                continue  # no rank waits for a gradient of the first stage's input
            kind = "B"
        order.append(Action(stage=stage, kind=kind, micro_batch=micro_batch))
    return order


def backward_in_two(
    roots: Sequence[Tensor],
    gradients: Sequence[Tensor] | None,
    received: Sequence[Tensor],
    weights: Sequence[nn.Parameter],
) -> Callable[[], None]:
    """Compute the gradients of `received` now; returns a function that computes those of the weights later.

    `gradients`: of the roots; None if the root is a loss. Roots that don't depend on received tensors have their
    whole backward now.
    """
    gradients_of_roots = [root.new_ones(()) for root in roots] if gradients is None else list(gradients)
    trained = [
        (root, gradient) for root, gradient in zip(roots, gradients_of_roots, strict=True) if root.requires_grad
    ]
    # AccumulateGrad nodes of the received leaves, where a backward of inputs ends.
    beginnings = {get_gradient_edge(tensor).node for tensor in received if tensor.requires_grad}
    split = [(root, gradient) for root, gradient in trained if _leads_to(root, beginnings)]
    whole = [pair for pair in trained if not any(pair[0] is root for root, _ in split)]
    if whole:
        torch.autograd.backward([root for root, _ in whole], [gradient for _, gradient in whole], retain_graph=True)
    if not split:
        return lambda: None
    # PyTorch detaches roots in place, which fails for views and for roots from which other roots are computed.
    ends = [root.clone() if is_view(root) or len(split) > 1 else root for root, _ in split]
    taken = [tensor for tensor in received if tensor.requires_grad]
    groups = backward_of_inputs(ends, [gradient for _, gradient in split], taken, weights)

    return partial(backward_of_weights, weights, groups)


def _leads_to(root: Tensor, beginnings: Collection[Node]) -> bool:
    """Whether a tensor depends on one of the nodes in `beginnings`."""
    waiting, seen = [get_gradient_edge(root).node], set[Node]()
    while waiting:
        node = waiting.pop()
        if node in beginnings:
            return True
        if node not in seen:
            seen.add(node)
            waiting += [before for before, _ in node.next_functions if before is not None]
    return False
