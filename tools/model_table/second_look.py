"""A second look at what is refused: the stated cause is removed from model or rows, and the pair is tried again.

A reason is true where the pair then takes the same step. Where the cause can't be removed from a model without making
another one of it, the layout that the message advises is tried instead.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from model_table.entry import HELD_OUT, SAMPLES, Entry, Row
from model_table.result import Result
from samestep.torch_internals.modules import AnyBatchNorm

MARK = "@"  # between a model's name and that of its variant


@dataclass(frozen=True, kw_only=True)
class Look:
    """What is tried for refusals with a reason."""

    reason: str  # a pattern
    variant: str | None = None  # of VARIANTS: how the cause is removed
    layout: str | None = None  # another layout, which the message advises
    impossible: str | None = None  # why no layout exists for such rows, where the second look shows the cause


LOOKS = (
    Look(
        reason=r"padding counts in the model|all samples padded to one length",
        variant="rows of one length",
        impossible="its outputs depend on how far a batch is padded; with rows of one length it takes the same step",
    ),
    Look(reason=r"use group norm", variant="group norm"),
    Look(reason=r"use sequence=whole", layout="tp2"),
    Look(reason=r"use dp\w* or fsdp\w*", layout="fsdp2"),
)


@dataclass(frozen=True)
class _OneLength:
    """Rows whose texts are all as long as the shortest."""

    row: Callable[[int], Row]

    def __call__(self, index: int) -> Row:
        rows = [self.row(each) for each in range(SAMPLES + HELD_OUT)]
        lengths = {name: min(len(row[name]) for row in rows) for name, value in rows[0].items() if _is_text(value)}
        return {name: value[: lengths[name]] if name in lengths else value for name, value in rows[index].items()}


def _is_text(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim == 1


@dataclass(frozen=True)
class _GroupNorm:
    """A model with group norm in the place of batch norm."""

    model: Callable[[], nn.Module]

    def __call__(self) -> nn.Module:
        model = self.model()
        for module in list(model.modules()):
            for name, child in module.named_children():
                if isinstance(child, AnyBatchNorm):
                    setattr(module, name, nn.GroupNorm(1, child.num_features))
        return model


VARIANTS: Mapping[str, Callable[[Entry], Entry]] = {
    "rows of one length": lambda entry: replace(entry, row=_OneLength(entry.row)),
    "group norm": lambda entry: replace(entry, model=_GroupNorm(entry.model)),
}


def varied(entry: Entry, variant: str) -> Entry:
    """An entry with a cause removed."""
    return replace(VARIANTS[variant](entry), name=f"{entry.name}{MARK}{variant}")


def look_at(result: Result) -> Look | None:
    """What the reason of a refused pair is tried by; None where nothing is known for it."""
    if not result.miss or result.verdict != "refused":
        return None
    return next((look for look in LOOKS if re.search(look.reason, result.reason)), None)


def pairs(results: Sequence[Result]) -> Mapping[str, Sequence[str]]:
    """What is to be tried: names of models, with their variant, and the layouts of each."""
    wanted: dict[str, list[str]] = {}
    for result in results:
        look = look_at(result)
        if look is not None and look.variant is not None:
            wanted.setdefault(f"{result.model}{MARK}{look.variant}", []).append(result.layout)
    return wanted


def settled(results: Sequence[Result], known: Mapping[tuple[str, str], Result]) -> Sequence[Result]:
    """Results with those declared impossible whose cause is shown to lie in the rows, not in samestep."""
    return [_settled(each, known) for each in results]


def _settled(each: Result, known: Mapping[tuple[str, str], Result]) -> Result:
    look = look_at(each)
    if look is None or look.impossible is None or not verdict(each, known).startswith("✓"):
        return each
    return replace(each, impossible=look.impossible)


def verdict(result: Result, known: Mapping[tuple[str, str], Result]) -> str:
    """What the second look at a refused pair came to: true, untrue, or nothing yet."""
    look = look_at(result)
    if look is None:
        return "?"
    name = result.model if look.variant is None else f"{result.model}{MARK}{look.variant}"
    tried = known.get((name, look.layout or result.layout))
    if tried is None:
        return "?"
    return f"{'✓' if tried.verdict == 'same step' else '≠'} {look.variant or f'`{look.layout}`'}"
