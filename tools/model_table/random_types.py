"""Entries of the types that were drawn from transformers' registries."""

from functools import cache, partial
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from model_table.drawing import Drawn, drawn
from model_table.entry import Entry, NotMadeError, Row
from model_table.made import Style, collate, fitting
from model_table.tiny import SIZES, tiny

_LARGEST = 30_000_000  # parameters


def entries() -> list[Entry]:
    return [entry(each) for each in drawn()]


def entry(each: Drawn) -> Entry:
    """An entry that builds its model and finds its rows when it is used."""
    rows = _Rows(each)
    return Entry(
        name=each.type,
        kind=each.stratum,
        model=partial(build, each),
        row=rows.row,
        collate=collate,
        half="drawn",
        weight=each.stands_for,
    )


class _Rows:
    """Rows of a type, whose style is found at the first."""

    def __init__(self, each: Drawn) -> None:
        self._drawn = each

    def row(self, index: int) -> Row:
        return style_of(self._drawn).row(index)


@cache
def style_of(each: Drawn) -> Style:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            return fitting(build(each), each.registry)
        except ValueError as error:
            raise NotMadeError(str(error)) from error


def build(each: Drawn) -> nn.Module:
    """A tiny model of a type, with the first sizes that it can be built with."""
    head: Any = getattr(transformers, each.head)
    return head(configuration(each))


@cache
def configuration(each: Drawn) -> Any:
    head: Any = getattr(transformers, each.head)
    kind = head.config_class or getattr(transformers, CONFIG_MAPPING_NAMES[each.type])
    others = {"is_decoder": each.registry == "CAUSAL_LM", "num_labels": 3, "use_cache": False}
    first: Exception | None = None
    for sizes in SIZES:
        try:
            config = tiny(kind, sizes, **others)
            with torch.random.fork_rng(devices=[]), torch.device("meta"):
                model = head(config)
            if sum(parameter.numel() for parameter in model.parameters()) < _LARGEST:
                return config
            first = first or ValueError("its smallest configuration is too large")
        except Exception as error:
            first = first or error
    text = " ".join(str(first).split())[:200]
    raise NotMadeError(f"{each.head} can't be built tiny ({type(first).__name__}: {text})")
