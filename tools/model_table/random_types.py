"""Entries of the types that were drawn from transformers' registries."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from model_table.drawing import Drawn, drawn
from model_table.entry import Entry, NotMadeError, Row
from model_table.made import Style, collate, fitting
from model_table.tiny import SIZES, tiny

_LARGEST = 30_000_000  # parameters


def entries() -> list[Entry]:
    return [entry(each) for each in drawn()]


def entry(each: Drawn) -> Entry:
    """An entry that finds its configuration and rows when it is used."""
    return Entry(
        name=each.type,
        kind=each.stratum,
        model=_Model(each),
        row=_Row(each),
        collate=collate,
        half="drawn",
        weight=each.stands_for,
    )


@dataclass(frozen=True)
class _Row:
    drawn: Drawn

    def __call__(self, index: int) -> Row:
        return made(self.drawn).style.row(index)


@dataclass(frozen=True)
class _Model:
    """Builds a type's model. What is sent to the ranks is the configuration, which they needn't find again."""

    drawn: Drawn

    def __call__(self) -> nn.Module:
        return made(self.drawn).model()

    def __reduce__(self) -> tuple[Callable[[], nn.Module], tuple[()]] | tuple[Any, ...]:
        return _Built, (self.drawn.head, made(self.drawn).config)


@dataclass(frozen=True)
class _Built:
    head: str
    config: PreTrainedConfig

    def __call__(self) -> nn.Module:
        return getattr(transformers, self.head)(self.config)


@dataclass(frozen=True)
class Made:
    """A type as it is trained here."""

    model: _Built
    style: Style

    @property
    def config(self) -> PreTrainedConfig:
        return self.model.config


@cache
def made(each: Drawn) -> Made:
    """The first configuration of a type with which it can be built and takes rows. Raises NotMadeError for none."""
    head: Any = getattr(transformers, each.head)
    said: list[str] = []
    for sizes in SIZES:
        try:
            config = _configuration(each, head, sizes)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                return Made(_Built(each.head, config), fitting(head(config), each.registry))
        except Exception as error:
            said.append(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
    raise NotMadeError("; ".join(dict.fromkeys(said)))


def _configuration(each: Drawn, head: Any, sizes: Any) -> PreTrainedConfig:
    kind = head.config_class or getattr(transformers, CONFIG_MAPPING_NAMES[each.type])
    others = {"is_decoder": each.registry == "CAUSAL_LM", "num_labels": 3, "use_cache": False}
    config = tiny(kind, sizes, **others)
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        model = head(config)
    if sum(parameter.numel() for parameter in model.parameters()) > _LARGEST:
        raise ValueError("its smallest configuration is too large")
    return config
