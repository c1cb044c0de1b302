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

from samestep import environment
from samestep.engines.deepspeed.config import Config
from samestep.engines.deepspeed.start import quietly
from samestep.errors import UserError

_BUILDERS = "deepspeed.ops.op_builder"
_BUILD = f"from {_BUILDERS} import AsyncIOBuilder; AsyncIOBuilder().load(verbose=False)"

_LONGEST_BUILD = 600  # seconds


def to_disk(config: Mapping[str, Any]) -> bool:
    """Whether a configuration moves the optimizer's state to disk."""
    return _device(config, "offload_optimizer") == "nvme"


def check(given: Mapping[str, Any]) -> None:
    """Raise UserError for a user's configuration that moves parameters to disk."""
    if _device(given, "offload_param") == "nvme":
        raise UserError(
            "the DeepSpeed configuration has offload_param on nvme, from where DeepSpeed 0.19 takes parameters for "
            'bf16 whatever they are; "device": "cpu", or engine native with offload=parameters-disk, would do'
        )


def _device(config: Mapping[str, Any], section: str) -> str | None:
    return (config.get("zero_optimization", {}).get(section) or {}).get("device")


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


def placed(config: Config, folder: Path | None) -> tuple[Config, Any]:
    """A configuration whose offload to disk has a folder, and what keeps that folder until this rank ends.

    A folder of the configuration's own stays as it is.
    """
    if not to_disk(config):
        return config, None
    # With several parameters in a group it reads the gradient of one that doesn't begin at a multiple of 256 numbers
    # from the wrong place, and takes another step (DeepSpeed 0.19). A group a parameter begins at 0.
    zero = {**config["zero_optimization"], "sub_group_size": 1}
    place = None
    if not zero["offload_optimizer"].get("nvme_path"):
        place = TemporaryDirectory(dir=folder, prefix="samestep-deepspeed-")
        zero["offload_optimizer"] = {**zero["offload_optimizer"], "nvme_path": place.name}
    return {**config, "zero_optimization": zero}, place
