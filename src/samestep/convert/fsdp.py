"""Folders of PyTorch's distributed checkpoint: Accelerate's of FSDP (pytorch_model_fsdp_0), and any others."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.distributed.checkpoint import Metadata

from samestep.checkpoint.one_process import Tensors, write_model
from samestep.checkpoint.safe_index import METADATA_FILE
from samestep.convert.base import OutputOptions, Weights
from samestep.errors import CheckpointError
from samestep.run_folder import INFO_FILE

_OF_ACCELERATE = "pytorch_model_fsdp_0"
_MODEL = "model"  # the section of a state dict in which a model stands


def recognises(path: Path) -> bool:
    return _folder(path) is not None


def fits(path: Path) -> bool:
    return path.name == _OF_ACCELERATE


@contextmanager
def open_(path: Path) -> Iterator[Weights]:
    folder = _folder(path)
    if folder is None:
        raise CheckpointError(f"{path} has no {METADATA_FILE} and no folder {_OF_ACCELERATE}; use a folder of one")
    tensors = Tensors(folder)
    keys = _keys_of_model(tensors)
    if not keys:
        raise CheckpointError(f"{folder} holds no tensors of a model, at the top or in a section called {_MODEL}")
    yield Weights(
        entries={name: tensors.entries[key] for name, key in keys.items()},
        read=lambda name: tensors.read(keys[name]),
    )


def write(into: Path, name: str, weights: Weights, _: OutputOptions) -> None:
    """The folder that Accelerate's `load_state` looks into for a model under FSDP, with every name of each tensor."""
    folder = into if name == _OF_ACCELERATE else into / _OF_ACCELERATE
    names = weights.names()
    entries = {each: weights.entries[known] for each, known in names.items()}
    write_model(folder, entries, lambda each: weights.read(names[each]))


def _folder(path: Path) -> Path | None:
    for folder in (path, path / _OF_ACCELERATE):
        if (folder / METADATA_FILE).is_file() and not (folder / INFO_FILE).is_file():
            return folder
    return None


def _keys_of_model(tensors: Tensors) -> dict[str, str]:
    """The names of the model's tensors -> the keys under which the folder has them."""
    paths = _paths(tensors.index)
    keys: dict[str, str] = {}
    for key in tensors.entries:
        path = paths.get(key, (key,))
        if _MODEL in path[:-1]:
            keys[".".join(path[path.index(_MODEL) + 1 :])] = key
    # Without sections all is the model, but for what an optimizer's or a schedule's name says that it isn't.
    return keys or {key: key for key in tensors.entries if not key.startswith(("optim", "lr_scheduler"))}


def _paths(index: Metadata) -> dict[str, tuple[str, ...]]:
    """Where each key stood in the nested state dict that was saved, where PyTorch's planner says it."""
    said = index.planner_data if isinstance(index.planner_data, dict) else {}
    return {str(key): tuple(map(str, path)) for key, path in said.items() if isinstance(path, tuple)}
