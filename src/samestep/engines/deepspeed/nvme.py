"""Offload to disk: the build of DeepSpeed's extension for it, and its section of a configuration."""

import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console

from samestep import environment, private_folders
from samestep.engines.deepspeed.config import Config
from samestep.engines.deepspeed.initialize import quietly
from samestep.engines.deepspeed.keys import offload_of
from samestep.errors import UserError

_BUILDERS = "deepspeed.ops.op_builder"
_BUILD = f"from {_BUILDERS} import AsyncIOBuilder; AsyncIOBuilder().load(verbose=False)"

# A shell that starts a job in the background has SIGINT ignored, and so have the job's children. A second one would
# interrupt what the first has to do.
_INTERRUPTIBLE = """\
import signal
def interrupted(number, frame):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt
signal.signal(signal.SIGINT, interrupted)
"""

_LONGEST_BUILD = 600  # seconds
_TO_END = 10.0  # seconds that an interrupted build has to let go of what it holds


def to_disk(config: Mapping[str, Any]) -> bool:
    """Whether a configuration moves the optimizer's state to disk."""
    return offload_of(config, "offload_optimizer") == "nvme"


def check(config: Mapping[str, Any]) -> None:
    """Raise UserError for a user's configuration that moves parameters to disk."""
    if offload_of(config, "offload_param") == "nvme":
        raise UserError(
            "the DeepSpeed configuration has offload_param on nvme, from where DeepSpeed 0.19 takes parameters for "
            'bf16 whatever they are; use "device": "cpu", or engine native with offload=parameters-disk'
        )


@cache
def build(device_type: str) -> None:
    """Build the extension unless it is built, in a process of its own. Raises UserError where it can't be."""
    _check_folder()
    ranks = environment.ranks()
    title = "DeepSpeed's extension for the disk; where it isn't built yet, some minutes"
    shown = Console(stderr=True).status(title) if ranks is None or ranks.rank == 0 else nullcontext()
    try:
        with environment.deepspeed_settings(device_type, 0), shown:
            returncode, output = _run_build()
    except subprocess.TimeoutExpired:
        raise UserError(
            f"DeepSpeed's extension async_io is not built after {_LONGEST_BUILD} seconds; a build that was killed "
            "leaves a file named lock for which others wait: delete async_io/lock and pin_memory/lock in "
            "~/.cache/torch_extensions/* (or TORCH_EXTENSIONS_DIR)"
        ) from None
    if returncode:
        raise _missing((output.strip().splitlines() or ["without a word"])[-1])


def _check_folder() -> None:
    """Raise UserError if another user could put a library where the extension is loaded from."""
    folder = environment.extension_folder()
    try:
        private_folders.make(folder)
    except (private_folders.NotPrivateError, OSError) as error:
        raise UserError(
            f"DeepSpeed's extension async_io is built in {folder}, and loaded from there: "
            f"{private_folders.explained(error, 'TORCH_EXTENSIONS_DIR names another folder')}"
        ) from None


def _run_build() -> tuple[int, str]:
    """Its exit code and what it wrote to stderr."""
    command = [sys.executable, "-c", _INTERRUPTIBLE + _BUILD]
    # A session of its own: one signal then reaches the build's own processes too, and no terminal sends it twice.
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            _, output = process.communicate(timeout=_LONGEST_BUILD)
        except BaseException:
            # PyTorch's lock on the build is a file, which a process that is killed leaves to all builds after it.
            _signal(process, signal.SIGINT)
            try:
                process.communicate(timeout=_TO_END)
            except subprocess.TimeoutExpired:
                _signal(process, signal.SIGKILL)
            raise
    return process.returncode, output


def _signal(process: subprocess.Popen[str], number: signal.Signals) -> None:
    """Send a signal to a build's process group; does nothing if it has ended."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def load(device: torch.device) -> None:
    """Load the extension into this process. Raises UserError where it can't be."""
    _check_folder()
    with quietly(device):
        try:
            importlib.import_module(_BUILDERS).AsyncIOBuilder().load(verbose=False)
        except (RuntimeError, OSError, ImportError, subprocess.SubprocessError) as error:
            raise _missing(str(error).strip().splitlines()[-1]) from None


def _missing(reason: str) -> UserError:
    """Why the extension for disks can't be built, and what to install."""
    return UserError(
        f"offload to disk by engine deepspeed is the work of its extension async_io, which can't be built here "
        f"({reason}); use `apt-get install libaio-dev g++` and `pip install ninja`, or engine native"
    )


def placed(config: Config, folder: Path | None) -> tuple[Config, Any]:
    """Complete an offload to disk with a temporary folder; returns the configuration and the folder to keep alive.

    A folder that the configuration names is left as it is.
    """
    if not to_disk(config):
        return config, None
    # With several parameters in a group, DeepSpeed 0.19 reads the gradient of one that doesn't begin at a multiple of
    # 256 elements from the wrong offset, and takes a wrong step. So each parameter gets its own group.
    zero = {**config["zero_optimization"], "sub_group_size": 1}
    place = None
    if not zero["offload_optimizer"].get("nvme_path"):
        place = TemporaryDirectory(dir=_checked_parent(folder), prefix="samestep-deepspeed-")
        zero["offload_optimizer"] = {**zero["offload_optimizer"], "nvme_path": place.name}
    return {**config, "zero_optimization": zero}, place


def _checked_parent(folder: Path | None) -> Path:
    """The folder of the ranks' temporary ones. Raises UserError if another user could exchange these."""
    if folder is None:
        return private_folders.temporary_folder()
    try:
        private_folders.check(folder, as_parent=True)
    except private_folders.NotPrivateError as error:
        raise UserError(
            f"run.offload_folder is {folder}, where another user could exchange the optimizer's state: "
            f"{error.advising('name another folder')}"
        ) from None
    return folder
