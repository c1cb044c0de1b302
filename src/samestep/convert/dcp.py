"""Folders of PyTorch's distributed checkpoint: samestep's own, and those of FSDP.

A checkpoint of samestep has its info file next to the tensors, and the model's tensors under a prefix. Accelerate has
a model under FSDP in a folder pytorch_model_fsdp_0; any other folder of a state dict is read too.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from torch.distributed.checkpoint import Metadata

from samestep.checkpoint.folder import fault_in_list, fault_of
from samestep.checkpoint.info import Info, read_info
from samestep.checkpoint.one_process import Tensors, write_model, write_weights
from samestep.checkpoint.safe_index import METADATA_FILE, files_of
from samestep.convert.base import OutputOptions, Weights
from samestep.errors import CheckpointError
from samestep.parallel.optimizer.average import AVERAGE
from samestep.parallel.state_shards import MODEL
from samestep.run_folder import INFO_FILE, candidates, step_of, versions


def recognises_own(path: Path) -> bool:
    """Whether a path holds a checkpoint of samestep, is one, or is a run with some."""
    return bool(candidates(path))


def fits_own(path: Path) -> bool:
    """Whether the name of a new folder is that of a step, such as step-0."""
    return step_of(path) is not None


@contextmanager
def open_own(path: Path) -> Iterator[Weights]:
    """The weights of a checkpoint, or of the newest one of a folder or a run. Raises CheckpointError if damaged."""
    paths = candidates(path)
    if not paths:
        raise CheckpointError(f"{path} holds no checkpoint of samestep; use the folder of one, or a run's")
    info = read_info(paths[0])
    tensors = Tensors(paths[0])
    if fault := fault_in_list(paths[0], info.files, files_of(tensors.index)) or fault_of(paths[0], info.files):
        raise CheckpointError(f"checkpoint {paths[0]} is damaged: {fault}")
    names = [name.removeprefix(MODEL) for name in tensors.entries if name.startswith(MODEL)]
    # Where an average of the weights is kept, that is what is evaluated and exported.
    stored = {name: AVERAGE + name if AVERAGE + name in tensors.entries else MODEL + name for name in names}
    yield Weights(
        entries={name: tensors.entries[there] for name, there in stored.items()},
        read=lambda name: tensors.read(stored[name]),
        tied=info.tied,
        recipe=info.recipe,
        base=info.base,
    )


def write_own(into: Path, name: str, weights: Weights, _: OutputOptions) -> None:
    """A checkpoint of the weights alone, before the first step; a training from it begins with a new optimizer."""
    if step_of(Path(name)) not in (None, 0):
        raise CheckpointError(f"{name} is the name of a later step, and converted weights are at step 0; use step-0")
    info = Info(
        step=0,
        epoch=None,
        layout="",
        processes=0,
        engine="",
        recipe={},
        base=weights.base,
        tied=weights.tied,
        versions=versions(),
        saved_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    write_weights(into, weights.entries, weights.read, info)


_OF_ACCELERATE = "pytorch_model_fsdp_0"
_MODEL = "model"  # the section of a state dict in which a model stands


def recognises_fsdp(path: Path) -> bool:
    """Whether a path, or Accelerate's folder in it, is a distributed checkpoint that is not samestep's."""
    return _folder(path) is not None


def fits_fsdp(path: Path) -> bool:
    """Whether a new folder has the name that Accelerate gives to a model under FSDP."""
    return path.name == _OF_ACCELERATE


@contextmanager
def open_fsdp(path: Path) -> Iterator[Weights]:
    """The weights of the model in a folder. Raises CheckpointError where there is none, or it has no model."""
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


def write_fsdp(into: Path, name: str, weights: Weights, _: OutputOptions) -> None:
    """The folder that Accelerate's `load_state` looks into for a model under FSDP, with every name of each tensor."""
    folder = into if name == _OF_ACCELERATE else into / _OF_ACCELERATE
    names = weights.names()
    entries = {key: weights.entries[name] for key, name in names.items()}
    write_model(folder, entries, lambda key: weights.read(names[key]))


def _folder(path: Path) -> Path | None:
    """Return the folder of the distributed checkpoint: the path or Accelerate's subfolder of it; None without one."""
    for folder in (path, path / _OF_ACCELERATE):
        if (folder / METADATA_FILE).is_file() and not (folder / INFO_FILE).is_file():
            return folder
    return None


def _keys_of_model(tensors: Tensors) -> dict[str, str]:
    """Map the names of the model's tensors to their keys in the checkpoint."""
    paths = _paths(tensors.index)
    keys: dict[str, str] = {}
    for key in tensors.entries:
        path = paths.get(key, (key,))
        if _MODEL in path[:-1]:
            keys[".".join(path[path.index(_MODEL) + 1 :])] = key
    # Without sections every key is the model's, except those named like optimizer or schedule state.
    return keys or {key: key for key in tensors.entries if not key.startswith(("optim", "lr_scheduler"))}


def _paths(index: Metadata) -> dict[str, tuple[str, ...]]:
    """Return each key's path in the saved nested state dict, if PyTorch's planner recorded it."""
    planner_data = index.planner_data if isinstance(index.planner_data, dict) else {}
    return {str(key): tuple(map(str, path)) for key, path in planner_data.items() if isinstance(path, tuple)}
