"""The optimizer of a step in turns: one, whose parameter groups have the rates of their turns.

PyTorch's optimizers pass over parameters without a gradient, and in a turn only its own have one. So an optimizer of
all parameters steps those of each turn as one of its own would.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch import nn
from torch.optim import Optimizer

from samestep.recipe import Recipe
from samestep.tasks.turns import Turn
from samestep.training.optimizer_plan import OptimizerPlan


def optimizer_of_turns(
    recipe: Recipe, model: nn.Module, turns: Sequence[Turn], parameters: Iterable[tuple[str, nn.Parameter]]
) -> Optimizer:
    """An optimizer over what a rank holds of the whole `model`, with each turn's settings or else the recipe's."""
    named = list(parameters)
    made: list[Optimizer] = []
    for turn in turns:
        own = [(name, parameter) for name, parameter in named if turn.steps(name) and parameter.requires_grad]
        if own:
            plan = OptimizerPlan(replace(recipe, optimizer=turn.optimizer or recipe.optimizer), model)
            made.append(plan(own))
    first, *others = made
    for other in others:
        for group in other.param_groups:
            first.add_param_group(group)
    return first
