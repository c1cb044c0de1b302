"""Forwards that ask for values: where ranks with parts of a model or of its tokens decide the same, and where not.

Why it matters: ranks of one model that took different branches would wait for each other's messages for ever, or take
another step than one process. Values of the inputs alone are the same on all ranks of a model, and don't count here.
"""

from functools import partial

from torch import nn

from samestep.errors import LayoutError
from samestep.layout import Layout
from samestep.parallel.blocks import caller_of, find_blocks, is_list_of_like, with_forward
from samestep.parallel.calls import Trace


def check_asking(model: nn.Module, layout: Layout, seen: Trace) -> None:
    """Raise LayoutError where what a forward decides by values would be decided otherwise by a part of the model.

    A stage of a pipeline has the values of its own blocks alone. A rank with a part of the tokens may decide for each
    token, as a mixture of experts does, and not for all. Slices of matrices change no value.
    """
    names = {id(module): name for name, module in model.named_modules()}
    blocks = [names[id(block)] for block in with_forward(find_blocks(model))]
    mixtures = _mixtures(model)
    for name, function in seen.asking.items():
        what = f"{name} ({type(model.get_submodule(name)).__name__})" if name else type(model).__name__
        said = f'layout "{layout}": the forward of {what} asks for values ({function})'
        if layout.pipeline > 1 and not any(name == block or name.startswith(f"{block}.") for block in blocks):
            raise LayoutError(
                f"{said} outside of the layers that stages share out, and a stage has those of its own layers alone; "
                f"use dp{layout.size}, zero1x{layout.size} or fsdp{layout.size}"
            )
        split = layout.context > 1 or layout.sequence == "split"
        if split and not any(name == mixture or name.startswith(f"{mixture}.") for mixture in mixtures):
            raise LayoutError(
                f"{said}, and a rank has some of the tokens, whose values may decide otherwise than all; use "
                f"dp{layout.size} or fsdp{layout.size}, or tp{layout.tensor * layout.context} with sequence=whole"
            )


def _mixtures(model: nn.Module) -> list[str]:
    """The modules that call equal modules of a list, or hold stacks of matrices."""
    alike = partial(is_list_of_like, of_any_size=True)
    lists = [caller_of(model, name) for name, module in model.named_modules() if alike(module)]
    stacks = [
        name for name, module in model.named_modules() if any(p.ndim == 3 for p in module.parameters(recurse=False))
    ]
    return [name for name in (*lists, *stacks) if name]
