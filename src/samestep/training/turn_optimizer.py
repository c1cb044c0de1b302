"""The optimizer of a step in turns: one, whose parameter groups have the rates of their turns.

PyTorch's optimizers pass over parameters without a gradient, and in a turn only its own have one. So an optimizer of
all parameters steps those of each turn as one of its own would.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from samestep.tasks.turns import Turn

MakeOptimizer = Callable[[Any, Iterator[tuple[str, nn.Parameter]]], Optimizer]


def optimizer_of_turns(
    make: MakeOptimizer, spec: Any, turns: Sequence[Turn], parameters: Iterable[tuple[str, nn.Parameter]]
) -> Optimizer:
    """An optimizer over named parameters, `make`'s of each turn's settings or else those of `spec`."""
    named = list(parameters)
    made: list[Optimizer] = []
    for turn in turns:
        own = [(name, parameter) for name, parameter in named if turn.steps(name) and parameter.requires_grad]
        if own:
            made.append(make(turn.optimizer or spec, iter(own)))
    first, *others = made
    for other in others:
        for group in other.param_groups:
            first.add_param_group(group)
    return first
