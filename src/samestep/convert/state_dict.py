"""A plain state dict: a file of torch.save with tensors by names; and DDP's, whose names begin with `module.`."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from samestep.convert import pickles
from samestep.convert.base import OutputOptions, Weights
from samestep.errors import CheckpointError
from samestep.parallel.sharding import Entry

_DDP = "module."
_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")


def recognises(path: Path) -> bool:
    return pickles.is_pickle(path) and not is_ddp(state_dict_of(path))


def recognises_ddp(path: Path) -> bool:
    return pickles.is_pickle(path) and is_ddp(state_dict_of(path))


def fits(path: Path) -> bool:
    return path.suffix in _SUFFIXES


@contextmanager
def open_(path: Path) -> Iterator[Weights]:
    yield weights_of(state_dict_of(path))


@contextmanager
def open_ddp(path: Path) -> Iterator[Weights]:
    state = state_dict_of(path)
    if not is_ddp(state):
        name = next(name for name in state if not name.startswith(_DDP))
        raise CheckpointError(f"{path} is no file of DDP: {name} doesn't begin with {_DDP}; use state-dict")
    yield without_ddp(weights_of(state))


def write(into: Path, name: str, weights: Weights, _: OutputOptions) -> None:
    pickles.save(into / name, weights, dict)


def write_ddp(into: Path, name: str, weights: Weights, _: OutputOptions) -> None:
    pickles.save(into / name, weights, lambda values: {_DDP + each: value for each, value in values.items()})


def weights_of(state: Mapping[str, Tensor]) -> Weights:
    """The weights that a state dict holds; names of one tensor are tied."""
    known: dict[Any, str] = {}
    tied: dict[str, str] = {}
    for name, value in state.items():
        # Offset and strides, too: views of one memory may be different tensors.
        place = (value.untyped_storage().data_ptr(), value.storage_offset(), value.shape, value.stride(), value.dtype)
        if value.numel() and place in known:
            tied[name] = known[place]
        else:
            known[place] = name
    entries = {name: Entry(shape=value.shape, dtype=value.dtype) for name, value in state.items() if name not in tied}
    return Weights(entries=entries, read=lambda name: state[name].detach(), tied=tied)


def state_dict_of(path: Path) -> dict[str, Tensor]:
    """The tensors in a file: all of it, or its one section that is names and tensors, whatever it is called.

    Raises CheckpointError where there are none, or several.
    """
    content = pickles.load(path)
    if _is_state_dict(content):
        return dict(content)
    sections = {name: part for name, part in content.items() if _is_state_dict(part)} if _is_mapping(content) else {}
    if len(sections) == 1:
        return dict(next(iter(sections.values())))
    found = f"it has {len(sections)} of them: {', '.join(map(str, sections))}" if sections else "it has none"
    raise CheckpointError(
        f"{path} should hold the tensors of a model by their names, at the top or in one section; {found}. "
        "torch.save(model.state_dict(), file) writes such a file"
    )


def _is_mapping(value: Any) -> bool:
    return isinstance(value, Mapping)


def _is_state_dict(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and len(value) > 0
        and all(isinstance(name, str) for name in value)
        and all(isinstance(part, Tensor) and part.layout == torch.strided for part in value.values())
    )


def is_ddp(names: Iterable[str]) -> bool:
    return all(name.startswith(_DDP) for name in names)


def without_ddp(weights: Weights) -> Weights:
    """The same under the names that the model has without DDP."""
    return replace(
        weights,
        entries={name.removeprefix(_DDP): entry for name, entry in weights.entries.items()},
        read=lambda name: weights.read(_DDP + name),
        tied={name.removeprefix(_DDP): known.removeprefix(_DDP) for name, known in weights.tied.items()},
    )
