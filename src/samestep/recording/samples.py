"""Which samples went into a model: a hash of each row of its inputs, whatever batch the row stands in."""

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from samestep.torch_internals.sharded import AsyncCollectiveTensor, DTensor

_DEPTH = 4  # containers inside each other that are looked into
_MASK = "attention_mask"
_IGNORED = -100  # the label of a token that has no loss, in PyTorch's cross entropy


def named_tensors(value: Any, name: str = "", depth: int = _DEPTH) -> Iterator[tuple[str, Tensor]]:
    """Yield the plain tensors of arguments or results with the path to each, such as 0 or 1.labels.

    Opens containers and dataclasses, no other objects; leaves out DTensors and tensors without values. For one that
    is still being sent it waits, as the script would.
    """
    if isinstance(value, AsyncCollectiveTensor):
        value = value.trigger_wait()
    if isinstance(value, Tensor):
        if not isinstance(value, DTensor) and value.layout == torch.strided and not value.is_meta:
            yield name, value
        return
    if depth == 0:
        return
    if isinstance(value, Mapping):
        inner: Iterator[tuple[Any, Any]] = iter(value.items())
    elif isinstance(value, (list, tuple)):
        inner = iter(enumerate(value))
    elif is_dataclass(value) and not isinstance(value, type):
        inner = ((field_.name, getattr(value, field_.name)) for field_ in fields(value))
    else:
        return
    for key, nested in inner:
        yield from named_tensors(nested, f"{name}.{key}" if name else str(key), depth - 1)


def address_of(tensor: Tensor) -> int | None:
    """Where a tensor's numbers are; None for one that is made of others, such as quantized ones."""
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return None


@dataclass(frozen=True, kw_only=True)
class ForwardRows:
    """The rows of one forward."""

    batch: int  # how many
    hashes: Mapping[str, Sequence[str]] = field(default_factory=dict)  # input path -> hashes of its rows
    counts: Mapping[str, int] = field(default_factory=dict)  # possible divisors of a mean over the batch
    shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)  # input path -> sizes of a row


def rows_of(args: Sequence[Any], kwargs: Mapping[str, Any], made: Container[int | None] = ()) -> ForwardRows | None:
    """The rows of a model's inputs, as the first tensor among them has them; None where there is none.

    `made`: addresses of what other models have returned, which is no sample.

    A batch is padded to its longest row, so a row is what its attention mask leaves of it.
    """
    tensors = {name: value for name, value in (*named_tensors(args), *named_tensors(kwargs)) if value.dim() > 0}
    tensors = {name: value for name, value in tensors.items() if address_of(value) not in made}
    if not tensors:
        return None
    batch = next(iter(tensors.values())).shape[0]
    tensors = {name: value.detach() for name, value in tensors.items() if value.shape[0] == batch}
    mask = next((value for name, value in tensors.items() if name.endswith(_MASK) and value.dim() == 2), None)
    return ForwardRows(
        batch=batch,
        hashes={name: [_hash(row) for row in _left(value, mask)] for name, value in tensors.items()},
        counts={"rows": batch, **_counts(tensors)},
        shapes={name: list(value.shape[1:]) for name, value in tensors.items()},
    )


def _left(value: Tensor, mask: Tensor | None) -> Iterator[Tensor]:
    """Yield the rows without padding."""
    value = value.cpu()
    if mask is None or value.shape[: mask.dim()] != mask.shape:
        yield from value
        return
    for row, kept in zip(value, mask.cpu() != 0, strict=True):
        yield row[kept]


def _hash(row: Tensor) -> str:
    return blake2b(row.contiguous().reshape(-1).view(torch.uint8).numpy().data, digest_size=8).hexdigest()


def _counts(inputs: Mapping[str, Tensor]) -> dict[str, int]:
    """Count the tokens of a batch by masks and labels: possible divisors of a mean over tokens."""
    counts = {}
    for name, value in inputs.items():
        if value.dtype.is_floating_point or value.dtype.is_complex or value.dim() < 2:
            continue
        if name.endswith(_MASK) or value.dtype == torch.bool:
            counts[f"{name} != 0"] = int((value != 0).sum())
        elif bool((value == _IGNORED).any()) or name.endswith("labels"):
            counts[f"{name} != {_IGNORED}"] = int((value != _IGNORED).sum())
    return counts


def random_state() -> str:
    """Hash the state of this process's random generator, without drawing."""
    return _hash(torch.get_rng_state())
