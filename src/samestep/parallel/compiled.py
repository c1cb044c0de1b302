"""Compilation: each block compiled by itself, so that like blocks share what was compiled."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from samestep.errors import LayoutError, UserError
from samestep.layout import Layout


def check_compile(model: nn.Module, layout: Layout) -> None:
    """Raise UserError for what can't be compiled and still take the same step."""
    if layout.pipeline > 1 or layout.context > 1:
        what = "stages" if layout.pipeline > 1 else "blocks on parts of the tokens"
        raise LayoutError(f'layout "{layout}": {what} are not compiled yet; run.compile: false would do')
    for name, module in model.named_modules():
        for key, probability in _probabilities(module):
            if probability > 0:
                raise UserError(
                    f"run.compile: {name or 'the model'} has {key} of {probability}, and masks that are the same for "
                    "every layout are not compiled yet; recipe.dropout: false, or run.compile: false, would do"
                )


def compile_blocks(blocks: Sequence[nn.Module]) -> None:
    """Compile blocks in place, at their first call."""
    for block in blocks:
        block.compile()


def _probabilities(module: nn.Module) -> Iterator[tuple[str, float]]:
    """What is called dropout in a module, and its value."""
    if isinstance(module, nn.modules.dropout._DropoutNd):
        yield "p", module.p
    values: dict[str, Any] = vars(module)
    yield from ((key, value) for key, value in values.items() if "drop" in key and isinstance(value, float))
