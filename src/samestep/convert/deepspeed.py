"""DeepSpeed's checkpoints of any ZeRO stage: weights put together from the flat partitions of the ranks.

Where each parameter lies in them differs between stages 1 and 2, and stage 3.

ZeRO-1 and 2 keep, for each parameter group, one flat vector of all parameters, cut over the ranks and padded at its
end. ZeRO-3 cuts each parameter by itself: rank r has numbers r * ceil(n / ranks) to the next. Both are fp32 copies,
which are what is read.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from samestep.convert import torch_files
from samestep.convert.base import OutputOptions, Weights
from samestep.convert.torch_files import weights_of
from samestep.errors import CheckpointError
from samestep.parallel.sharding import Entry

Readers = dict[str, tuple[Entry, Callable[[], Tensor]]]
States = Sequence[Mapping[str, Any]]


def of_flat_groups(folder: Path, models: States, states: States) -> Readers:
    """Stages 1 and 2: a group's parameters lie end to end in one flat tensor, of which each rank has a stretch."""
    readers: Readers = {}
    groups = models[0]["param_shapes"]
    paddings = states[0].get("param_alignment_paddings") or [[0] * len(shapes) for shapes in groups]
    for number, (shapes, after) in enumerate(zip(groups, paddings, strict=True)):
        stretches = [state["single_partition_of_fp32_groups"][number] for state in states]
        offset = 0
        for (name, shape), padding in zip(shapes.items(), after, strict=True):
            readers[name] = _reader(stretches, offset, shape)
            offset += shape.numel() + padding
        _check_length(folder, offset, sum(map(len, stretches)), slack=2 * len(states))
    shared = models[0].get("shared_params") or {}
    for name, value in models[0]["module"].items():  # complete here, with tensors that no optimizer steps
        if name not in readers and name not in shared:
            readers[name] = Entry(shape=value.shape, dtype=value.dtype), lambda value=value: value
    return readers


def of_stage_3(folder: Path, models: States, states: States) -> Readers:
    """Stage 3: each parameter is cut into as many equal stretches as ranks, the last filled up with padding.

    A rank's stretches of all parameters lie end to end in its flat tensors, over the borders of these.
    """
    ranks = len(states)
    shapes = {name: shape for group in models[0]["param_shapes"] for name, shape in group.items()}
    flat = [state["fp32_flat_groups"] for state in states]
    readers: Readers = {}
    offset = 0
    for name, shape in shapes.items():
        length = -(-shape.numel() // ranks)
        readers[name] = _reader_of_ranks(flat, offset, length, shape)
        offset += length
    _check_length(folder, offset, sum(map(len, flat[0])), slack=0)
    for name, shape in (models[0].get("frozen_param_shapes") or {}).items():
        parts = [model["frozen_param_fragments"][name] for model in models]
        length = -(-shape.numel() // len(parts))
        readers[name] = _reader_of_ranks([[part] for part in parts], 0, length, shape)
    return readers


def _reader(stretches: Sequence[Tensor], offset: int, shape: torch.Size) -> tuple[Entry, Callable[[], Tensor]]:
    """Return the entry of a parameter in the ranks' concatenated flat tensors, and the function that reads it."""
    entry = Entry(shape=shape, dtype=stretches[0].dtype)
    return entry, lambda: _taken(stretches, offset, shape.numel()).view(shape)


def _reader_of_ranks(
    flat: Sequence[Sequence[Tensor]], offset: int, length: int, shape: torch.Size
) -> tuple[Entry, Callable[[], Tensor]]:
    """Return the entry of a ZeRO-3 parameter, and the function that joins its `length` numbers of each rank."""

    def read() -> Tensor:
        padded = torch.cat([_taken(stretches, offset, length) for stretches in flat])
        return padded[: shape.numel()].view(shape)

    return Entry(shape=shape, dtype=flat[0][0].dtype), read


def _taken(stretches: Sequence[Tensor], offset: int, length: int) -> Tensor:
    """`length` numbers from `offset` on, of tensors that lie end to end."""
    starts = accumulate(chain([0], map(len, stretches)))
    parts = [
        stretch[max(0, offset - start) : max(0, offset + length - start)]
        for stretch, start in zip(stretches, starts, strict=False)
    ]
    return torch.cat(parts)


def _check_length(folder: Path, used: int, there: int, *, slack: int) -> None:
    """Raise CheckpointError unless the partitions are as long as the parameters; `slack`: of padding at the end."""
    if not used <= there <= used + slack:
        raise CheckpointError(
            f"{folder}: its parameters have {used:,} numbers, and the ranks' partitions {there:,}; "
            "they are not of one checkpoint"
        )


_LATEST = "latest"
_TAG = "global_step0"  # of what is written
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_LAYER = "layer_*"


class _Number(int):
    """Stand-in for an enumeration's value while unpickling."""


class _Ignored:
    """Stand-in for a pickled object without weights."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass


_ALLOWED: Sequence[torch_files.Allowed] = (
    (_Number, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (_Ignored, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (_Ignored, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (_Ignored, "deepspeed.utils.tensor_fragment.fragment_address"),
)


def recognises(path: Path) -> bool:
    return _folder(path) is not None


@contextmanager
def open_(path: Path) -> Iterator[Weights]:
    """Open the weights, in float32 where ZeRO kept them so. Raises CheckpointError for missing or unknown parts."""
    folder = _folder(path)
    if folder is None:
        raise CheckpointError(f"{path} has no *_model_states.pt, and no {_LATEST} that names a folder with them")
    models = [torch_files.load_pickle(file, _ALLOWED) for file in _files(folder, _MODEL)]
    optimizers = [torch_files.load_pickle(file, _ALLOWED) for file in _files(folder, _OPTIMIZER)]
    _check(folder, models)
    if not optimizers:
        yield weights_of(models[0]["module"])
        return
    states = [optimizer.get("optimizer_state_dict", {}) for optimizer in optimizers]
    try:
        yield _put_together(folder, models, states)
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder} is not laid out as DeepSpeed's ZeRO checkpoints are: {error!r}") from None


def write(into: Path, _: str, weights: Weights, __: OutputOptions) -> None:
    """What `engine.load_checkpoint(folder, load_module_only=True)` reads, without ZeRO and at its stages 1 and 2."""
    folder = into / _TAG
    folder.mkdir()

    def wrap(values: Mapping[str, Tensor]) -> dict[str, Any]:
        """Wrap the module's state dict in the structure that DeepSpeed's loader expects of one rank."""
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

    torch_files.save_pickle(folder / "mp_rank_00_model_states.pt", weights, wrap)
    (into / _LATEST).write_text(_TAG, encoding="utf-8")


def _folder(path: Path) -> Path | None:
    """The folder with the ranks' files that a path means: itself, or the one that its `latest` names."""
    latest = path / _LATEST
    tag = latest.read_text(encoding="utf-8", errors="replace").strip() if latest.is_file() else ""
    folders = [path, *([path / tag] if tag and Path(tag).name == tag else [])]
    return next((folder for folder in folders if folder.is_dir() and any(folder.glob("*_model_states.pt"))), None)


def _files(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    """List the ranks' files that match a pattern, by rank. Raises CheckpointError for parts of a sliced model."""
    files = [(match, file) for file in folder.iterdir() if (match := pattern.fullmatch(file.name))]
    sliced = [file for match, file in files if int(match[2])] or list(folder.glob(_LAYER))
    if sliced:
        raise CheckpointError(
            f"{sliced[0]} is part of a model that was sliced by tensor or pipeline parallelism; weights of ZeRO "
            "alone are put together here"
        )
    files = sorted(files, key=lambda numbered: int(numbered[0][1] or 0))
    for rank, (match, _) in enumerate(files):
        if int(match[1] or 0) != rank:
            raise CheckpointError(
                f"{folder} lacks the file of rank {rank}, but has {files[-1][1].name}; copy it there"
            )
    return [file for _, file in files]


def _check(folder: Path, models: Sequence[Any]) -> None:
    """Raise CheckpointError for what is no checkpoint of DeepSpeed, or of experts."""
    if not models or not all(
        isinstance(model, Mapping) and isinstance(model.get("module"), Mapping) for model in models
    ):
        raise CheckpointError(f"{folder} has no module in its *_model_states.pt; use a checkpoint of DeepSpeed")
    if any(models[0].get("num_experts") or ()):
        raise CheckpointError(f"{folder} is of a mixture of experts, whose files are not put together here")


def _put_together(folder: Path, models: Sequence[Mapping[str, Any]], states: Sequence[Mapping[str, Any]]) -> Weights:
    """The float32 weights of the flat partitions, with the buffers and frozen parameters of the models' files."""
    partitions = states[0]["partition_count"]
    count = max(partitions) if isinstance(partitions, list) else partitions
    if count != len(states):
        raise CheckpointError(f"{folder} has {len(states)} files of optimizer states, and {count} ranks wrote some")
    stage = int(states[0]["zero_stage"])
    put_together = of_stage_3 if stage == 3 else of_flat_groups
    readers: dict[str, tuple[Entry, Callable[[], Tensor]]] = {}
    readers |= put_together(folder, models, states)
    for name in models[0]["buffer_names"]:
        if name in models[0]["module"]:
            value = models[0]["module"][name]
            readers[name] = Entry(shape=value.shape, dtype=value.dtype), lambda value=value: value
    entries = {name: replace(entry, dtype=_wide(entry.dtype)) for name, (entry, _) in readers.items()}
    shared = models[0].get("shared_params") or {}
    tied = {name: other for name, other in shared.items() if other in entries and name not in entries}
    return Weights(entries=entries, read=lambda name: readers[name][1]().to(entries[name].dtype), tied=tied)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """float32 for half precision, as the weights are."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
