"""Files of torch.save: plain state dicts, DDP's, and those in Accelerate's folders of `save_state` without FSDP.

A state dict has tensors by their names; DDP puts `module.` before each name. Files are read without running what they
may contain, and written from one tensor at a time.
"""

import os
import pickle
import shutil
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from samestep.checkpoint.one_process import as_os_error
from samestep.checkpoint.safe_index import refusal
from samestep.convert import safetensors
from samestep.convert.base import OutputOptions, Weights
from samestep.errors import CheckpointError
from samestep.parallel.sharding import Entry
from samestep.run_folder import candidates

# A class that a pickle may refer to, and the qualified name that it uses.
Allowed = tuple[type, str]

_FORMER = pickle.dumps(torch.serialization.MAGIC_NUMBER, protocol=torch.serialization.DEFAULT_PROTOCOL)


def is_pickle(path: Path) -> bool:
    """Whether a file begins as torch.save's do: as a zip archive, or, in former times, with a pickled number."""
    if not path.is_file():
        return False
    try:
        with path.open("rb") as stream:
            return stream.read(len(_FORMER)).startswith((b"PK", _FORMER))
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error.strerror}") from None


def load_pickle(path: Path, allowed: Iterable[Allowed] = ()) -> Any:
    """Load a torch.save file; its tensors stay memory-mapped.

    `allowed`: further classes that the file may name. Raises CheckpointError for a file that is damaged, and for one
    that names anything but tensors, plain values, and what is allowed: to load such a file could run code.
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
    except Exception as error:  # a damaged file can raise any exception
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{path} is damaged, or no file of torch.save: {reason}") from None


def save_pickle(file: Path, weights: Weights, wrap: Callable[[Mapping[str, Tensor]], Any]) -> None:
    """Write what `wrap` makes of every name's tensor by torch.save.

    torch.save takes all tensors at once. Each is mapped from a file of its own meanwhile, which the system can drop
    from memory, so that tensors which don't fit into memory together can be written. Raises OSError.
    """
    scratch = file.with_name(f"{file.name}.tensors")
    scratch.mkdir()
    try:
        mapped = {
            name: _mapped(scratch / str(number), weights.read(name)) for number, name in enumerate(weights.entries)
        }
        values = {name: mapped[own_name] for name, own_name in weights.names().items()}
        torch.save(wrap(values), file)
    except RuntimeError as error:
        raise as_os_error(error) from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _mapped(file: Path, value: Tensor) -> Tensor:
    """Copy a tensor into a memory-mapped file. Raises OSError if the disk is full."""
    if not value.numel():
        return value.clone()
    with file.open("wb") as stream:  # writing into the mapping of a full disk would end the process by SIGBUS
        os.posix_fallocate(stream.fileno(), 0, value.nbytes)
    mapped = torch.from_file(str(file), shared=True, size=value.numel(), dtype=value.dtype).view(value.shape)
    return mapped.copy_(value)


_DDP = "module."

_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")


def recognises(path: Path) -> bool:
    """Whether a path is a file of torch.save with a state dict, and not DDP's."""
    return is_pickle(path) and not is_ddp(state_dict_of(path))


def recognises_ddp(path: Path) -> bool:
    """Whether a path is a file of torch.save whose state dict is DDP's."""
    return is_pickle(path) and is_ddp(state_dict_of(path))


def fits(path: Path) -> bool:
    """Whether the name of a new file is one that people give to files of torch.save."""
    return path.suffix in _SUFFIXES


@contextmanager
def open_(path: Path) -> Iterator[Weights]:
    """The weights of a state dict, left on disk until they are used."""
    yield weights_of(state_dict_of(path))


@contextmanager
def open_ddp(path: Path) -> Iterator[Weights]:
    """The weights of DDP's state dict, by the model's own names. Raises CheckpointError for another state dict."""
    state = state_dict_of(path)
    if not is_ddp(state):
        name = next(name for name in state if not name.startswith(_DDP))
        raise CheckpointError(f"{path} is no file of DDP: {name} doesn't begin with {_DDP}; use state-dict")
    yield without_ddp(weights_of(state))


def write(into: Path, name: str, weights: Weights, _: OutputOptions) -> None:
    """Write a state dict with every name of each tensor."""
    save_pickle(into / name, weights, dict)


def write_ddp(into: Path, name: str, weights: Weights, _: OutputOptions) -> None:
    """Write a state dict as a model in DDP loads it."""
    save_pickle(into / name, weights, lambda values: {_DDP + name_: value for name_, value in values.items()})


def weights_of(state: Mapping[str, Tensor]) -> Weights:
    """Return the weights in a state dict; names that share one tensor are tied."""
    first_names: dict[Any, str] = {}
    tied: dict[str, str] = {}
    for name, value in state.items():
        # Compare offset and strides too: views of one storage may be different tensors.
        place = (value.untyped_storage().data_ptr(), value.storage_offset(), value.shape, value.stride(), value.dtype)
        if value.numel() and place in first_names:
            tied[name] = first_names[place]
        else:
            first_names[place] = name
    entries = {name: Entry(shape=value.shape, dtype=value.dtype) for name, value in state.items() if name not in tied}
    return Weights(entries=entries, read=lambda name: state[name].detach(), tied=tied)


def state_dict_of(path: Path) -> dict[str, Tensor]:
    """The tensors in a file: all of it, or its one section that is names and tensors, whatever it is called.

    Raises CheckpointError where there are none, or several.
    """
    content = load_pickle(path)
    if _is_state_dict(content):
        return dict(content)
    sections = {name: part for name, part in content.items() if _is_state_dict(part)} if _is_mapping(content) else {}
    if len(sections) == 1:
        return dict(next(iter(sections.values())))
    sections_there = f"it has {len(sections)} of them: {', '.join(map(str, sections))}" if sections else "it has none"
    raise CheckpointError(
        f"{path} should hold the tensors of a model by their names, at the top or in one section; {sections_there}. "
        "torch.save(model.state_dict(), file) writes such a file"
    )


def _is_mapping(value: Any) -> bool:
    return isinstance(value, Mapping)


def _is_state_dict(value: Any) -> bool:
    """Whether a value is a mapping of names to dense tensors, and not empty."""
    return (
        isinstance(value, Mapping)
        and len(value) > 0
        and all(isinstance(name, str) for name in value)
        and all(isinstance(part, Tensor) and part.layout == torch.strided for part in value.values())
    )


def is_ddp(names: Iterable[str]) -> bool:
    """Whether all names are those of a model in DDP."""
    return all(name.startswith(_DDP) for name in names)


def without_ddp(weights: Weights) -> Weights:
    """Return the weights with the `module.` prefix of DDP removed from their names."""
    return replace(
        weights,
        entries={name.removeprefix(_DDP): entry for name, entry in weights.entries.items()},
        read=lambda name: weights.read(_DDP + name),
        tied={name.removeprefix(_DDP): other.removeprefix(_DDP) for name, other in weights.tied.items()},
    )


# The files that may hold the weights, and who reads them.
_ACCELERATE_FILES = {
    "model.safetensors": safetensors.open_,
    "model.safetensors.index.json": safetensors.open_,
    "pytorch_model.bin": open_,
    "pytorch_model_fsdp.bin": open_,  # of FSDP with a full state dict
}


def recognises_accelerate(path: Path) -> bool:
    """Any folder with weights under these names, but those of transformers and of samestep's runs."""
    return _accelerate_file(path) is not None and not (path / "config.json").is_file() and not candidates(path)


@contextmanager
def open_accelerate(path: Path) -> Iterator[Weights]:
    """The weights of a folder of Accelerate's, by the model's own names. Raises CheckpointError without any."""
    file = _accelerate_file(path)
    if file is None:
        raise CheckpointError(
            f"{path} has none of {', '.join(_ACCELERATE_FILES)}; use a folder of Accelerate's save_state"
        )
    with _ACCELERATE_FILES[file](path / file) as weights:
        # Accelerate saves the wrapped model.
        yield without_ddp(weights) if is_ddp(weights.names()) else weights


def write_accelerate(into: Path, _: str, weights: Weights, options: OutputOptions) -> None:
    """Files that `accelerate.load_checkpoint_in_model` reads."""
    safetensors.write(into, "model.safetensors", weights, options)


def _accelerate_file(path: Path) -> str | None:
    """The name of the first file with weights that a folder has."""
    return next((file for file in _ACCELERATE_FILES if (path / file).is_file()), None)
