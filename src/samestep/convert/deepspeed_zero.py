"""DeepSpeed's checkpoints of any ZeRO stage: weights put together from the flat partitions of the ranks.

The layout is that of DeepSpeed 0.19: `latest` names a folder with `*_model_states.pt` and, with ZeRO,
`*_optim_states.pt` of each rank, in which the float32 weights stand. DeepSpeed is not needed, and its objects are
not made: classes that stand for nothing take their place.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from samestep.convert import pickles, zero_partitions
from samestep.convert.base import Asked, Weights
from samestep.convert.state_dict import weights_of
from samestep.errors import CheckpointError
from samestep.parallel.parts import Entry

_LATEST = "latest"
_TAG = "global_step0"  # of what is written
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_LAYER = "layer_*"


class _Number(int):
    """Stands for an enumeration's value."""


class _Ignored:
    """Stands for an object that says nothing of weights."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass


_ALLOWED: Sequence[pickles.Allowed] = (
    (_Number, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (_Ignored, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (_Ignored, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (_Ignored, "deepspeed.utils.tensor_fragment.fragment_address"),
)


def recognises(path: Path) -> bool:
    return _folder(path) is not None


@contextmanager
def open_(path: Path) -> Iterator[Weights]:
    """The weights, in float32 where ZeRO kept them so. Raises CheckpointError where parts are missing or unknown."""
    folder = _folder(path)
    if folder is None:
        raise CheckpointError(f"{path} has no *_model_states.pt, and no {_LATEST} that names a folder with them")
    models = [pickles.load(file, _ALLOWED) for file in _files(folder, _MODEL)]
    optimizers = [pickles.load(file, _ALLOWED) for file in _files(folder, _OPTIMIZER)]
    _check(folder, models)
    if not optimizers:
        yield weights_of(models[0]["module"])
        return
    states = [each.get("optimizer_state_dict", {}) for each in optimizers]
    try:
        yield _put_together(folder, models, states)
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder} is not laid out as DeepSpeed's ZeRO checkpoints are: {error!r}") from None


def write(into: Path, _: str, weights: Weights, __: Asked) -> None:
    """What `engine.load_checkpoint(folder, load_module_only=True)` reads, without ZeRO and at its stages 1 and 2."""
    folder = into / _TAG
    folder.mkdir()

    def wrap(values: Mapping[str, Tensor]) -> dict[str, Any]:
        return {
            "module": dict(values),
            "buffer_names": [],
            "optimizer": None,
            "lr_scheduler": None,
            "global_steps": 0,
            "skipped_steps": 0,
            "global_samples": 0,
            "dp_world_size": 1,
            "mp_world_size": 1,
        }

    pickles.save(folder / "mp_rank_00_model_states.pt", weights, wrap)
    (into / _LATEST).write_text(_TAG, encoding="utf-8")


def _folder(path: Path) -> Path | None:
    """The folder with the ranks' files that a path means: itself, or the one that its `latest` names."""
    latest = path / _LATEST
    tag = latest.read_text(encoding="utf-8", errors="replace").strip() if latest.is_file() else ""
    folders = [path, *([path / tag] if tag and Path(tag).name == tag else [])]
    return next((folder for folder in folders if folder.is_dir() and any(folder.glob("*_model_states.pt"))), None)


def _files(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    """The ranks' files of a kind, in the order of the ranks. Raises CheckpointError for parts of a sliced model."""
    found = [(match, file) for file in folder.iterdir() if (match := pattern.fullmatch(file.name))]
    sliced = [file for match, file in found if int(match[2])] or list(folder.glob(_LAYER))
    if sliced:
        raise CheckpointError(
            f"{sliced[0]} is part of a model that was sliced by tensor or pipeline parallelism; weights of ZeRO "
            "alone are put together here"
        )
    found = sorted(found, key=lambda each: int(each[0][1] or 0))
    for rank, (match, _) in enumerate(found):
        if int(match[1] or 0) != rank:
            raise CheckpointError(f"{folder} lacks the file of rank {rank} beside {found[-1][1].name}; copy it there")
    return [file for _, file in found]


def _check(folder: Path, models: Sequence[Any]) -> None:
    if not models or not all(
        isinstance(each, Mapping) and isinstance(each.get("module"), Mapping) for each in models
    ):
        raise CheckpointError(f"{folder} has no module in its *_model_states.pt; a checkpoint of DeepSpeed would do")
    if any(models[0].get("num_experts") or ()):
        raise CheckpointError(f"{folder} is of a mixture of experts, whose files are not put together here")


def _put_together(folder: Path, models: Sequence[Mapping[str, Any]], states: Sequence[Mapping[str, Any]]) -> Weights:
    """The float32 weights of the flat partitions, with the buffers and frozen parameters of the models' files."""
    partitions = states[0]["partition_count"]
    count = max(partitions) if isinstance(partitions, list) else partitions
    if count != len(states):
        raise CheckpointError(f"{folder} has {len(states)} files of optimizer states, and {count} ranks wrote some")
    stage = int(states[0]["zero_stage"])
    put_together = zero_partitions.of_stage_3 if stage == 3 else zero_partitions.of_flat_groups
    readers: dict[str, tuple[Entry, Callable[[], Tensor]]] = {}
    readers |= put_together(folder, models, states)
    for name in models[0]["buffer_names"]:
        if name in models[0]["module"]:
            value = models[0]["module"][name]
            readers[name] = Entry(shape=value.shape, dtype=value.dtype), lambda value=value: value
    entries = {name: replace(entry, dtype=_wide(entry.dtype)) for name, (entry, _) in readers.items()}
    shared = models[0].get("shared_params") or {}
    tied = {name: known for name, known in shared.items() if known in entries and name not in entries}
    return Weights(entries=entries, read=lambda name: readers[name][1]().to(entries[name].dtype), tied=tied)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """float32 for half precision, as the weights are."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
