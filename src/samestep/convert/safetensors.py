"""safetensors: a file, or several of a bounded size with an index, by the names that Hugging Face gives them."""

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from samestep.convert.base import OutputOptions, Weights, bytes_of
from samestep.errors import CheckpointError, UserError
from samestep.input_files import parse_json, text_of
from samestep.parallel.sharding import Entry

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"


def recognises(path: Path) -> bool:
    return path.is_file() and path.name.endswith((SUFFIX, INDEX_SUFFIX))


def fits(path: Path) -> bool:
    return path.suffix == SUFFIX


@contextmanager
def open_(path: Path) -> Iterator[Weights]:
    """The weights in a file, or in the files of an index."""
    files = _of_index(path) if path.name.endswith(INDEX_SUFFIX) else {}
    with ExitStack() as stack:
        opened = {file: stack.enter_context(_opened(file)) for file in dict.fromkeys(files.values() or [path])}
        holders = {name: opened[file] for name, file in files.items()} or {
            name: holder
            for holder in opened.values()
            for name in holder.keys()  # noqa: SIM118 - it is not a mapping
        }
        yield Weights(
            entries={name: _entry(path, holder, name) for name, holder in holders.items()},
            read=lambda name: holders[name].get_tensor(name),
        )


def write(into: Path, name: str, weights: Weights, options: OutputOptions) -> None:
    """Every name of every tensor: safetensors refuses two names for one, so tied ones are written again."""
    write_as(into, name.removesuffix(SUFFIX), weights.names(), weights, options.shard_bytes)


def write_as(into: Path, stem: str, names: Mapping[str, str], weights: Weights, shard_bytes: int) -> None:
    """Write `names`, of which each is read under its value, as `stem`.safetensors or as shards of it.

    A shard is in memory while it is written, and nothing else is.
    """
    from huggingface_hub import split_state_dict_into_shards_factory

    split = split_state_dict_into_shards_factory(
        {name: weights.entries[own_name] for name, own_name in names.items()},
        get_storage_size=bytes_of,
        filename_pattern=stem + "{suffix}" + SUFFIX,
        max_shard_size=shard_bytes,
    )
    for file, held in split.filename_to_tensors.items():
        _save({name: weights.read(names[name]) for name in held}, into / file)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": dict(sorted(split.tensor_to_filename.items()))}
        (into / (stem + INDEX_SUFFIX)).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _save(values: Mapping[str, Tensor], file: Path) -> None:
    """Write one file; tensors that share memory are copied, since the format has no views."""
    seen: set[int] = set()
    alone: dict[str, Tensor] = {}
    for name, value in values.items():
        place = value.untyped_storage().data_ptr()
        alone[name] = value.clone() if place in seen else value.contiguous()
        seen.add(place)
    # The library creates the file with mode 0600; give it the mode of any new file.
    file.touch()
    mode = file.stat().st_mode
    try:
        save_file(alone, file, metadata={"format": "pt"})  # the framework of the names, which transformers requires
        file.chmod(mode)
    except SafetensorError as error:
        raise OSError(None, str(error), str(file)) from None


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """An opened file. Raises CheckpointError for a damaged one."""
    try:
        opened = safe_open(file, framework="pt")
    except FileNotFoundError:
        raise CheckpointError(f"there is no file {file}") from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is damaged, or no safetensors file: {error}") from None
    with opened as holder:
        yield holder


def _of_index(path: Path) -> dict[str, Path]:
    """Read each tensor's file. Raises CheckpointError for an invalid index, or one with paths outside its folder."""
    try:
        files = parse_json(text_of(path, missing=f"there is no file {path}"))["weight_map"]
        file_of = {str(name): str(file) for name, file in files.items()}
    except UserError as error:
        raise CheckpointError(str(error)) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is no index of safetensors files: {error!r}") from None
    for file in file_of.values():
        if Path(file).name != file:
            raise CheckpointError(f"{path} names the file {file}; use names of files in its folder")
    return {name: path.parent / file for name, file in file_of.items()}


def _entry(path: Path, holder: Any, name: str) -> Entry:
    """Shape and dtype of a tensor, without reading it."""
    try:
        part = holder.get_slice(name)
    except (SafetensorError, UnicodeError):  # UnicodeError: a name that no file can hold
        raise CheckpointError(f"{path} says that a file holds {name!r}, and it doesn't") from None
    return Entry(shape=torch.Size(part.get_shape()), dtype=_dtype_of(path, part.get_dtype()))


def _dtype_of(path: Path, name: str) -> torch.dtype:
    """PyTorch's dtype for the format's name. Raises CheckpointError for one that it doesn't have."""
    if name not in _DTYPES:
        raise CheckpointError(f"{path} holds tensors of type {name}; use {', '.join(_DTYPES)}")
    return _DTYPES[name]


# PyTorch's dtypes by the format's names.
_DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
