"""Weights: a model's tensors in whatever file, read one at a time; and Format: what reads and writes such files."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from samestep.checkpoint.compatibility import Base
from samestep.parallel.sharding import Entry
from samestep.tasks.transformers_model import Pretrained


@dataclass(frozen=True, kw_only=True)
class Weights:
    """A model's parameters and buffers by name. A tensor is read, whole and on the CPU, when it is asked for."""

    entries: Mapping[str, Entry]
    read: Callable[[str], Tensor]
    tied: Mapping[str, str] = field(default_factory=dict)  # further names of a tensor -> its name in `entries`
    recipe: Mapping[str, Any] = field(default_factory=dict)  # of the training, where the source tells it
    base: Base | None = None  # the adapters' base, whose weights are left out; None: nothing is left out
    pretrained_folder: Path | None = None  # a folder with the model's config.json and tokenizer

    @property
    def bytes(self) -> int:
        """Total bytes of the tensors; tied ones count once."""
        return sum(bytes_of(entry) for entry in self.entries.values())

    def names(self) -> dict[str, str]:
        """Map every name of every tensor to the name under which it is read."""
        tied = {other: name for other, name in self.tied.items() if name in self.entries}  # else it was left out
        return {**{name: name for name in self.entries}, **tied}

    def cast(self, dtype: torch.dtype) -> "Weights":
        """Return the weights with floating-point tensors cast to `dtype`; integer tensors keep theirs."""
        entries = {
            name: replace(entry, dtype=dtype) if entry.dtype.is_floating_point else entry
            for name, entry in self.entries.items()
        }
        return replace(self, entries=entries, read=partial(_read_as, self.read, entries))

    def watched(self, advance: Callable[[int], None]) -> "Weights":
        """Return weights whose `read` also calls `advance` with the bytes of each tensor."""
        return replace(self, read=partial(_read_and_tell, self.read, advance))


def _read_as(read: Callable[[str], Tensor], entries: Mapping[str, Entry], name: str) -> Tensor:
    return read(name).to(entries[name].dtype)


def _read_and_tell(read: Callable[[str], Tensor], advance: Callable[[int], None], name: str) -> Tensor:
    """Read a tensor, and tell how many bytes it was."""
    value = read(name)
    advance(value.nbytes)
    return value


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """Options for the files to write."""

    shard_bytes: int  # maximum bytes of one file, in formats with several
    pretrained: Callable[[Weights], Pretrained | None]  # configuration and tokenizer of a Hugging Face folder


@dataclass(frozen=True, kw_only=True)
class Format:
    """A file format of model weights."""

    title: str
    is_folder: bool  # whether it writes a folder, or a file (and perhaps others next to it)
    recognises: Callable[
        [Path], bool
    ]  # whether a path holds this; raises CheckpointError for what can't be looked at
    fits: Callable[[Path], bool]  # whether the name of a new path selects this format
    open: Callable[[Path], AbstractContextManager[Weights]]
    # Writes into an empty folder: the folder's files, or the file of this name. Raises CheckpointError, OSError.
    write: Callable[[Path, str, Weights, OutputOptions], None]
    # Whether it is of whole models, of adapters without their base, or of both.
    holds: Literal["whole", "adapters", "both"] = "whole"


def bytes_of(entry: Entry) -> int:
    """Bytes of a tensor with this shape and type."""
    return entry.shape.numel() * entry.dtype.itemsize


def never(_: Path) -> bool:
    """`fits` of formats that no file name selects."""
    return False
