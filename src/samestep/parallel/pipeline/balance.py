"""Balance: where to cut a list of blocks, so that the largest stage is as small as it can be."""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise

from torch import nn

from samestep.layout import Layout
from samestep.parallel.calls import Call, Trace

# What blocks `first` to `last - 1` cost as stage number `stage`.
Cost = Callable[[int, int, int], float]


def best_starts(blocks: int, stages: int, cost: Cost) -> list[int]:
    """The first block of each stage: consecutive blocks, at least one each, the dearest stage as cheap as can be.

    Of equally good cuts the one whose stages before the last are best is taken (dynamic programming over the
    stages from the last to the first; blocks^2 x stages costs).
    """

    @cache
    def best(stage: int, first: int) -> tuple[float, tuple[int, ...]]:
        if stage == stages - 1:
            return cost(stage, first, blocks), ()
        options = []
        for following in range(first + 1, blocks - (stages - 1 - stage) + 1):
            rest, starts = best(stage + 1, following)
            options.append((max(cost(stage, first, following), rest), (following, *starts)))
        return min(options)

    return [0, *best(0, 0)[1]]


def time_cost(trace: Trace, blocks: Sequence[Call]) -> Cost:
    """Multiplications of a forward, with those of what stands before, between and after the blocks."""
    ends = [0, *(block.flops_after for block in blocks[:-1]), trace.flops]
    # A block of no product takes a little time too.
    each = [max(after - before, 1) for before, after in pairwise(ends)]
    return lambda stage, first, last: sum(each[first:last])


def memory_cost(
    trace: Trace, blocks: Sequence[Call], modules: Sequence[nn.Module], model: nn.Module, layout: Layout
) -> Cost:
    """Bytes of parameters, gradients and Adam's two states, and of what forwards keep for their backward.

    Stage s of n keeps the activations of n - s micro-batches in 1F1B; of the example's samples here.
    """
    copies = _COPIES[layout.zero](layout.shard)
    stages = layout.pipeline * layout.stages_a_rank
    held = [sum(p.numel() * p.element_size() for p in module.parameters()) for module in modules]
    inside = {id(p) for module in modules for p in module.parameters()}
    outside = [(name, p) for name, p in model.named_parameters() if id(p) not in inside]
    # Those before the blocks are in the first stage, all others in the last.
    early = trace.behind(blocks[0].outputs())
    for name, parameter in outside:
        held[0 if name in early else -1] += parameter.numel() * parameter.element_size()
    kept = [0] * len(blocks)
    for call in trace.calls:
        here = next((i for i, block in enumerate(blocks) if call.began <= block.ended), len(blocks) - 1)
        if call.ended == call.began + 1:  # nothing was called in between
            kept[here] += sum(_bytes(tensor.shape, tensor.dtype.itemsize) for tensor in call.outputs())
    return lambda stage, first, last: copies * sum(held[first:last]) + (stages - stage) * sum(kept[first:last])


# Copies of a parameter that a rank holds by what is sharded over n ranks: itself, its gradient, Adam's two states.
_COPIES: dict[int, Callable[[int], float]] = {
    0: lambda n: 4,
    1: lambda n: 2 + 2 / n,
    2: lambda n: 1 + 3 / n,
    3: lambda n: 4 / n,
}


def _bytes(shape: Sequence[int], each: int) -> int:
    count = each
    for size in shape:
        count *= size
    return count
