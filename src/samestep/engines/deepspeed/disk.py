"""Offload to disk: DeepSpeed's extension for it, built once where it can be, and its part of a configuration."""

import importlib
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from samestep import environment
from samestep.engines.deepspeed.config import Config
from samestep.engines.deepspeed.start import quietly
from samestep.errors import UserError

_BUILDERS = "deepspeed.ops.op_builder"
_BUILD = f"from {_BUILDERS} import AsyncIOBuilder; AsyncIOBuilder().load(verbose=False)"

_LONGEST_BUILD = 600  # seconds


def to_disk(config: Mapping[str, Any]) -> bool:
    """Whether a configuration moves something to disk."""
    zero = config.get("zero_optimization", {})
    return any((zero.get(name) or {}).get("device") == "nvme" for name in ("offload_optimizer", "offload_param"))


@cache
def build(device_type: str) -> None:
    """Build the extension unless it is built, in a process of its own. Raises UserError where it can't be."""
    command = [sys.executable, "-c", _BUILD]
    try:
        with environment.deepspeed_settings(device_type, 0):
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_LONGEST_BUILD)
    except subprocess.TimeoutExpired:
        raise UserError(
            f"DeepSpeed's extension async_io is not built after {_LONGEST_BUILD} seconds; a build that was stopped "
            "leaves a file named lock for which others wait: to delete async_io/lock and pin_memory/lock in "
            "~/.cache/torch_extensions/* (or TORCH_EXTENSIONS_DIR) would do"
        ) from None
    if done.returncode:
        raise _missing((done.stderr.strip().splitlines() or ["without a word"])[-1])


def load(device: torch.device) -> None:
    """Load the extension into this process. Raises UserError where it can't be."""
    with quietly(device):
        try:
            importlib.import_module(_BUILDERS).AsyncIOBuilder().load(verbose=False)
        except (RuntimeError, OSError, ImportError, subprocess.SubprocessError) as error:
            raise _missing(str(error).strip().splitlines()[-1]) from None


def _missing(reason: str) -> UserError:
    return UserError(
        f"offload to disk by engine deepspeed is the work of its extension async_io, which can't be built here "
        f"({reason}); `apt-get install libaio-dev g++` and `pip install ninja` would do, and so would engine native"
    )


def placed(config: Config, folder: Path | None, model: nn.Module, ranks: int) -> tuple[Config, Any]:
    """A configuration whose offloads to disk have a folder, and what keeps that folder until this rank ends.

    A folder of the configuration's own stays as it is.
    """
    zero = dict(config["zero_optimization"])
    open_ones = [
        name
        for name in ("offload_optimizer", "offload_param")
        if (section := zero.get(name) or {}).get("device") == "nvme" and not section.get("nvme_path")
    ]
    if not open_ones:
        return config, None
    place = TemporaryDirectory(dir=folder, prefix="samestep-deepspeed-")
    for name in open_ones:
        zero[name] = {"nvme_path": place.name, **zero[name]}
    if "offload_param" in open_ones:
        # Its buffers are made for shards of 100 million numbers, and a billion numbers stay in memory unless it is
        # told otherwise.
        largest = max(parameter.numel() for parameter in model.parameters())
        zero["offload_param"] = {"buffer_size": -(-largest // ranks), "max_in_cpu": 0, **zero["offload_param"]}
    return {**config, "zero_optimization": zero}, place
