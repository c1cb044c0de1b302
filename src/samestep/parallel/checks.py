"""Checks for parts of a model whose behaviour a layout would change; each raises LayoutError before any step.

Gradient hooks and batch norm are found in the built model; data-dependent control flow is found in the trace.
"""

from functools import partial

from torch import nn

from samestep.errors import LayoutError
from samestep.layout import Layout
from samestep.parallel.blocks import caller_of, is_list_of_like
from samestep.parallel.calls import Trace
from samestep.torch_internals.tensors import has_gradient_hooks


def check_hooks(model: nn.Module, layout: Layout) -> None:
    """Raise LayoutError for gradient hooks on parameters, which this layout replaces by other tensors or shards."""
    for name, parameter in model.named_parameters():
        if has_gradient_hooks(parameter):
            raise LayoutError(
                f'layout "{layout}": {name} has a hook on its gradient (register_hook), which would not be called '
                "with the whole of it; use dp or zero1, or change the gradient in the forward, such as by a mask on "
                "the parameter"
            )


def check_asking(model: nn.Module, layout: Layout, seen: Trace) -> None:
    """Raise LayoutError if ranks could take different branches of data-dependent control flow.

    Ranks of one model that took different branches would deadlock in their collectives, or take another step than one
    process. Branches that depend only on the inputs are allowed, since all ranks of a model have the same inputs.

    A pipeline stage gets the values that are asked for (`pipeline.partition`). A rank with a part of the tokens may
    decide for each token, as a mixture of experts does, but not for all tokens. Slicing matrices changes no values.
    """
    if layout.context == 1 and layout.sequence != "split":
        return
    mixtures = _mixtures(model)
    for name, function in seen.asking.items():
        if any(name == mixture or name.startswith(f"{mixture}.") for mixture in mixtures):
            continue
        what = f"{name} ({type(model.get_submodule(name)).__name__})" if name else type(model).__name__
        raise LayoutError(
            f'layout "{layout}": the forward of {what} asks for values ({function}), and a rank has some of the '
            f"tokens, whose values may decide otherwise than all; use dp{layout.size} or fsdp{layout.size}, or "
            f"tp{layout.tensor * layout.context} with sequence=whole"
        )


def _mixtures(model: nn.Module) -> list[str]:
    """The mixtures of experts: modules that call like modules of a list, or hold stacks of matrices."""
    alike = partial(is_list_of_like, of_any_size=True)
    lists = [caller_of(model, name) for name, module in model.named_modules() if alike(module)]
    stacks = [
        name for name, module in model.named_modules() if any(p.ndim == 3 for p in module.parameters(recurse=False))
    ]
    return [name for name in (*lists, *stacks) if name]
