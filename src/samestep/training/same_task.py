"""Whether the ranks have built the same task: each builds it for itself, from the same arguments."""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from samestep.errors import UserError
from samestep.parallel.valueless import has_values
from samestep.tasks.base import Samples

_ELEMENTS = 4096  # of a tensor that are looked at


def check_same_task(samples: Samples, model: nn.Module) -> None:
    """Raise UserError, on every rank, where one has other samples or other initial weights than rank 0.

    The first sample and the last are compared, and those parameters and buffers that a rank holds whole. What is
    drawn from a generator without a seed, or read from a set of strings, differs in every process. Every rank must
    call this.
    """
    if dist.get_world_size() == 1:
        return
    mine = {"": _digest(len(samples))}
    ends = (0, len(samples) - 1) if len(samples) else ()
    mine |= {f"train_set()[{index}]": _digest(samples[index]) for index in ends}
    tensors = (*model.named_parameters(), *model.named_buffers())
    mine |= {f"model(): {name}": _digest(tensor) for name, tensor in tensors if _has_values(tensor)}
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    for rank, its in enumerate(ranks):
        if its.keys() != ranks[0].keys() or its[""] != ranks[0][""]:
            raise UserError(f"rank {rank} has built another task than rank 0{_FIX}")
        for what, digest in its.items():
            if digest != ranks[0][what]:
                raise UserError(f"{what} is another one on rank {rank} than on rank 0{_FIX}")


_FIX = (
    "; every rank builds the task by itself, so use PyTorch's generator in model(), generators with a seed "
    "elsewhere, and sorted(...) of sets"
)


def _has_values(tensor: Tensor) -> bool:
    return not tensor.is_meta and has_values(tensor)


def _digest(value: Any) -> str:
    found = hashlib.sha256()
    _add(found, value)
    return found.hexdigest()


def _add(found: Any, value: Any) -> None:
    """Add a nest of values to a digest; of what is no tensor, number or text, its kind alone."""
    if isinstance(value, Tensor):
        found.update(f"{tuple(value.shape)} {value.dtype}".encode())
        if value.layout is torch.strided and not value.is_meta:
            flat = value.detach().reshape(-1)
            few = flat[:: max(1, flat.numel() // _ELEMENTS)].cpu().contiguous()
            found.update(torch.view_as_real(few).numpy().tobytes() if few.is_complex() else _bytes(few))
    elif isinstance(value, Mapping):
        for key in value:
            found.update(f"{key}:".encode())
            _add(found, value[key])
    elif isinstance(value, (list, tuple)):
        found.update(f"{len(value)}:".encode())
        for inner in value:
            _add(found, inner)
    elif isinstance(value, (bool, int, float, complex, str, bytes)):
        found.update(repr(value).encode())
    elif type(value).__module__ == "numpy":
        found.update(value.tobytes() if value.dtype != object else b"objects")
    else:
        found.update(type(value).__name__.encode())


def _bytes(few: Tensor) -> bytes:
    return few.view(torch.uint8).numpy().tobytes() if few.numel() else b""
