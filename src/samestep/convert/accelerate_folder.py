"""Accelerate's folders of `save_state` without FSDP: the weights in model.safetensors or in a file of torch.save."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from samestep.convert import safetensors, state_dict
from samestep.convert.base import OutputOptions, Weights
from samestep.errors import CheckpointError
from samestep.run_folder import candidates

# The files that may hold the weights, and who reads them.
_FILES = {
    "model.safetensors": safetensors.open_,
    "model.safetensors.index.json": safetensors.open_,
    "pytorch_model.bin": state_dict.open_,
    "pytorch_model_fsdp.bin": state_dict.open_,  # of FSDP with a full state dict
}


def recognises(path: Path) -> bool:
    """Any folder with weights under these names, but those of transformers and of samestep's runs."""
    return _file(path) is not None and not (path / "config.json").is_file() and not candidates(path)


@contextmanager
def open_(path: Path) -> Iterator[Weights]:
    file = _file(path)
    if file is None:
        raise CheckpointError(f"{path} has none of {', '.join(_FILES)}; use a folder of Accelerate's save_state")
    with _FILES[file](path / file) as weights:
        # Accelerate saves a model as it wrapped it.
        yield state_dict.without_ddp(weights) if state_dict.is_ddp(weights.names()) else weights


def write(into: Path, _: str, weights: Weights, asked: OutputOptions) -> None:
    """Files that `accelerate.load_checkpoint_in_model` reads."""
    safetensors.write(into, "model.safetensors", weights, asked)


def _file(path: Path) -> str | None:
    return next((file for file in _FILES if (path / file).is_file()), None)
