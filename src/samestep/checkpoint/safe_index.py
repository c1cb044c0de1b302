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
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata

from samestep.errors import CheckpointError
from samestep.parallel.sharding import Entry
from samestep.run_folder import lies_within

METADATA_FILE = ".metadata"

_CLASSES: Final = {
    (each.__module__, each.__name__): each
    for each in (
        index.BytesStorageMetadata,
        index.ChunkStorageMetadata,
        index.Metadata,
        index.MetadataIndex,
        index.StorageMeta,
        index.TensorProperties,
        index.TensorStorageMetadata,
        index._MEM_FORMAT_ENCODING,
        _StorageInfo,
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
        if (module, name) == ("torch.serialization", "_get_layout"):
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
        found = _IndexUnpickler(io.BytesIO(file.read_bytes())).load()
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is no checkpoint: it has no {METADATA_FILE}") from None
    except Exception as error:  # a damaged pickle may raise any exception
        raise CheckpointError(f"{file} is damaged or no index of a checkpoint: {error}") from None
    if not isinstance(found, Metadata):
        raise CheckpointError(f"{file} is no index of a checkpoint: it holds a {type(found).__name__}")
    for stored in (found.storage_data or {}).values():
        name = getattr(stored, "relative_path", None)
        if not lies_within(name):
            raise CheckpointError(f"{file} is damaged: it says that tensors are in {name!r}, outside of its folder")
    found.storage_meta = found.storage_meta or index.StorageMeta()
    return found


def entries(metadata: Metadata) -> dict[str, Entry]:
    """The tensors of a checkpoint by name, without objects that aren't tensors."""
    return {
        name: Entry(shape=each.size, dtype=each.properties.dtype)
        for name, each in metadata.state_dict_metadata.items()
        if isinstance(each, TensorStorageMetadata) and not isinstance(each, BytesStorageMetadata)
    }
