"""A Hugging Face folder: config.json, the weights, and the tokenizer, as `from_pretrained` reads them."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from samestep.convert import safetensors, torch_files
from samestep.convert.base import OutputOptions, Weights
from samestep.errors import CheckpointError
from samestep.tasks.transformers_model import Pretrained

_CONFIG = "config.json"

# The files that may hold the weights, and who reads them.
_FILES = {
    "model.safetensors": safetensors.open_,
    "model.safetensors.index.json": safetensors.open_,
    "pytorch_model.bin": torch_files.open_,
}

# What stands next to config.json and belongs to the model. No code of a model's own is taken along.
_ALONG = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "vocab.*",
    "merges.txt",
    "chat_template.*",
)


def recognises(path: Path) -> bool:
    return (path / _CONFIG).is_file() and _file(path) is not None


@contextmanager
def open_(path: Path) -> Iterator[Weights]:
    """The weights of a folder, from whichever of its files there is. Raises CheckpointError for none."""
    file = _file(path)
    if file is None:
        raise CheckpointError(f"{path} has none of {', '.join(_FILES)}; use a folder of save_pretrained")
    with _FILES[file](path / file) as weights:
        yield replace(weights, pretrained_folder=path if (path / _CONFIG).is_file() else None)


def write(into: Path, _: str, weights: Weights, options: OutputOptions) -> None:
    """Write the folder. A tensor is written under one of its names: transformers ties the others to it."""
    pretrained = options.pretrained(weights)
    if pretrained is not None:
        names = _names(pretrained, weights)
        try:
            pretrained.save(into)
        except Exception as error:  # the tokenizers library raises a plain Exception on a full disk
            raise OSError(None, str(error)) from error
    elif weights.pretrained_folder is not None:
        names = {name: name for name in weights.entries}
        _copy_along(weights.pretrained_folder, into)
    else:
        raise CheckpointError(
            "a Hugging Face folder has the model's configuration and tokenizer, and nothing here says what they are; "
            "use --job JOB.yaml, of the job whose weights these are"
        )
    _say_dtype(into / _CONFIG, weights)
    safetensors.write_as(into, "model", names, weights, options.shard_bytes)


def _copy_along(folder: Path, into: Path) -> None:
    """Configuration and tokenizer go along with the weights."""
    for pattern in (_CONFIG, *_ALONG):
        for file in folder.glob(pattern):
            if file.is_file():
                shutil.copyfile(file, into / file.name)


def _names(pretrained: Pretrained, weights: Weights) -> dict[str, str]:
    """Map the names that transformers expects to the names of the weights.

    Raises CheckpointError unless these are the weights of the model that the configuration describes.
    """
    own_names = weights.names()
    chosen: dict[str, str] = {}
    expected: set[str] = set()
    for names, shape in pretrained.tensors():
        there = next((name for name in names if name in own_names), None)
        if there is None:
            raise CheckpointError(f"the job's model has {names[0]}, and the weights have no such tensor")
        shape_there = weights.entries[own_names[there]].shape
        if shape_there != shape:
            raise CheckpointError(f"{there} has shape {list(shape_there)}, and in the job's model {list(shape)}")
        chosen[names[0]] = own_names[there]
        expected.update(names)
    for name in own_names:
        if name not in expected:
            raise CheckpointError(f"the weights hold {name}, and the job's model has no such tensor")
    return chosen


def _say_dtype(config: Path, weights: Weights) -> None:
    """Write the weights' dtype into config.json, which `from_pretrained` uses for dtype="auto"."""
    kinds = {
        str(entry.dtype).removeprefix("torch.") for entry in weights.entries.values() if entry.dtype.is_floating_point
    }
    values = json.loads(config.read_text(encoding="utf-8"))
    values.pop("torch_dtype", None)  # the key of former versions of transformers
    if len(kinds) == 1:
        values["dtype"] = kinds.pop()
    config.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _file(path: Path) -> str | None:
    return next((file for file in _FILES if (path / file).is_file()), None)
