"""Files that torch.save wrote, read without running what they may contain, and written from one tensor at a time."""

import os
import pickle
import shutil
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from samestep.checkpoint.one_process import as_os_error
from samestep.checkpoint.safe_index import refusal
from samestep.convert.base import Weights
from samestep.errors import CheckpointError

# A class that a pickle may name, and the full name by which it does.
Allowed = tuple[type, str]

_FORMER = pickle.dumps(torch.serialization.MAGIC_NUMBER, protocol=torch.serialization.DEFAULT_PROTOCOL)


def is_pickle(path: Path) -> bool:
    """Whether a file begins as torch.save's do: as a zip archive, or, in former times, with a pickled number."""
    if not path.is_file():
        return False
    with path.open("rb") as stream:
        return stream.read(len(_FORMER)).startswith((b"PK", _FORMER))


def load(path: Path, allowed: Iterable[Allowed] = ()) -> Any:
    """What torch.save wrote, with its tensors left on disk until they are looked at.

    Raises CheckpointError for a file that is damaged, and for one that names anything but tensors, plain values, and
    what is allowed: to load such a file could run code.
    """
    try:
        with torch.serialization.safe_globals(list(allowed)):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path}: {refusal(error)}; "
            "use the weights alone (torch.save(model.state_dict(), file)), or a safetensors file"
        ) from None
    except FileNotFoundError:
        raise CheckpointError(f"there is no file {path}") from None
    except Exception as error:  # a damaged file raises whatever its bytes happen to mean
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{path} is damaged, or no file of torch.save: {reason}") from None


def save(file: Path, weights: Weights, wrap: Callable[[Mapping[str, Tensor]], Any]) -> None:
    """Write what `wrap` makes of every name's tensor by torch.save.

    It wants all tensors at once. They are mapped from files of their own meanwhile, which the system can drop from
    memory, so more tensors than memory can hold are written too. Raises OSError.
    """
    scratch = file.with_name(f"{file.name}.tensors")
    scratch.mkdir()
    try:
        mapped = {
            name: _mapped(scratch / str(number), weights.read(name)) for number, name in enumerate(weights.entries)
        }
        values = {name: mapped[known] for name, known in weights.names().items()}
        torch.save(wrap(values), file)
    except RuntimeError as error:
        raise as_os_error(error) from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _mapped(file: Path, value: Tensor) -> Tensor:
    if not value.numel():
        return value.clone()
    with file.open("wb") as stream:  # a write into a mapping of a full disk would end the process without a word
        os.posix_fallocate(stream.fileno(), 0, value.nbytes)
    mapped = torch.from_file(str(file), shared=True, size=value.numel(), dtype=value.dtype).view(value.shape)
    return mapped.copy_(value)
