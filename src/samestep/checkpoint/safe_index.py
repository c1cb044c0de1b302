"""Read the index of a checkpoint in PyTorch's format without running code that it may contain.

PyTorch pickles the index, and unpickling calls any function that a pickle names; this unpickler only accepts the
classes of an index.
"""

import io
import pickle
import re
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed.checkpoint.metadata as index
from torch.distributed.checkpoint import FileSystemReader, Metadata
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata

from samestep.checkpoint.plain_files import read_plain
from samestep.errors import CheckpointError, one_line
from samestep.parallel.sharding import Entry
from samestep.run_folder import lies_within
from samestep.torch_internals.checkpoint_index import CLASSES, LAYOUT_FUNCTION

METADATA_FILE = ".metadata"
_MOST_BYTES = 1 << 32  # of the index

_CLASSES: Final = {
    (kind.__module__, kind.__name__): kind
    for kind in (
        index.BytesStorageMetadata,
        index.ChunkStorageMetadata,
        index.Metadata,
        index.MetadataIndex,
        index.StorageMeta,
        index.TensorProperties,
        index.TensorStorageMetadata,
        *CLASSES,
    )
}
_LAYOUTS: Final = {"strided": torch.strided}


class _IndexUnpickler(pickle.Unpickler):
    """Unpickler that accepts the classes of PyTorch's index and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """Look up a class that an index may name, or a harmless replacement. Raises UnpicklingError for others."""
        if (module, name) in _CLASSES:
            return _CLASSES[module, name]
        if module == "torch":
            value = getattr(torch, name, None)
            if name == "Size" or isinstance(value, torch.dtype):
                return value
        if (module, name) == LAYOUT_FUNCTION:
            return _layout
        if module.partition(".")[0] == "pathlib" and name in ("PosixPath", "WindowsPath", "Path"):
            return _path
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no index needs")


def _path(*parts: str) -> str:
    return "/".join(parts)  # the path at saving; it is never opened


def _layout(name: str) -> torch.layout:
    return _LAYOUTS[name.removeprefix("torch.")]


def refusal(error: BaseException) -> str:
    """Explain in one line why tensors were not loaded: the function that their pickle names, or PyTorch's message."""
    named = re.search(r"GLOBAL ([\w.]+)", str(error))
    if isinstance(error, pickle.UnpicklingError) and named is not None:
        return f"it names {named[1]}, which is no part of a tensor; to load it could run code, so nothing of it was"
    return " ".join(str(error).split())[:200] or repr(error)


class SafeReader(FileSystemReader):
    """PyTorch's file reader with a safe read of the index; `index`: one that is already read."""

    def __init__(self, folder: Path, index: Metadata | None = None) -> None:
        super().__init__(folder)
        self._index = index

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._index or read_metadata(Path(self.path))


def read_metadata(folder: Path) -> Metadata:
    """Read the index of a checkpoint.

    Raises CheckpointError if it is missing, damaged, or names a function or a file outside of the folder.
    """
    file = folder / METADATA_FILE
    try:
        metadata = _IndexUnpickler(io.BytesIO(read_plain(file, _MOST_BYTES))).load()
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is no checkpoint: it has no {METADATA_FILE}") from None
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle may raise any exception
        raise CheckpointError(
            f"{file} is damaged or no index of a checkpoint: {one_line(error) or type(error).__name__}"
        ) from None
    if not isinstance(metadata, Metadata):
        raise CheckpointError(f"{file} is no index of a checkpoint: it holds a {type(metadata).__name__}")
    if fault := _fault_of(metadata):
        raise CheckpointError(f"{file} is damaged: {fault}")
    metadata.storage_meta = index.StorageMeta()  # nothing of it is needed
    return metadata


def _fault_of(metadata: Metadata) -> str | None:
    """What in an index can't be; None where its values have the types that an index has."""
    described, stored = getattr(metadata, "state_dict_metadata", None), getattr(metadata, "storage_data", None)
    metadata.planner_data = getattr(metadata, "planner_data", None)
    if not isinstance(described, dict) or not isinstance(stored, dict):
        return "it lists no tensors"
    for name, value in described.items():
        if not isinstance(name, str) or not (isinstance(value, BytesStorageMetadata) or _is_of_tensor(value)):
            return f"what it says of {str(name)[:100]!r} is not of a tensor"
    for key, value in stored.items():
        name = getattr(value, "relative_path", None)
        if not lies_within(name):
            return f"it says that tensors are in {str(name)[:200]!r}, outside of its folder"
        numbers = (getattr(value, "offset", None), getattr(value, "length", None))
        if not (isinstance(key, index.MetadataIndex) and all(type(at) is int and at >= 0 for at in numbers)):
            return f"it has a place in {name} that is none"
    return None


def _is_of_tensor(value: Any) -> bool:
    """Whether a value describes a tensor: its shape, its type, and its chunks."""
    if not isinstance(value, TensorStorageMetadata):
        return False
    properties, chunks = getattr(value, "properties", None), getattr(value, "chunks", None)
    if not isinstance(getattr(properties, "dtype", None), torch.dtype) or not isinstance(chunks, list):
        return False
    sizes = [getattr(value, "size", None)]
    sizes += [size for chunk in chunks for size in (getattr(chunk, "offsets", None), getattr(chunk, "sizes", None))]
    return all(isinstance(size, torch.Size) for size in sizes)


def files_of(metadata: Metadata) -> list[str]:
    """The names of the files that hold a checkpoint's tensors."""
    return sorted({stored.relative_path for stored in metadata.storage_data.values()})


def entries(metadata: Metadata) -> dict[str, Entry]:
    """The tensors of a checkpoint by name, without objects that aren't tensors."""
    return {
        name: Entry(shape=value.size, dtype=value.properties.dtype)
        for name, value in metadata.state_dict_metadata.items()
        if isinstance(value, TensorStorageMetadata) and not isinstance(value, BytesStorageMetadata)
    }
