"""Import and initialize DeepSpeed, without its warnings and without compiling extensions that a job does not use."""

import importlib
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from samestep import environment
from samestep.torch_internals.groups import all_groups

# The extension by which DeepSpeed sums over the ranks of a host through shared memory. It would be compiled at the
# first start, and a start that is stopped meanwhile leaves a lock on which all later ones wait for ever.
_SHARED_MEMORY = "deepspeed_shm_comm"

# Warnings that say nothing to a user: of SGD under ZeRO, which tests here hold against one process, and of a
# scheduler that DeepSpeed itself asks before its first step.
_NO_NEWS = ("ZeRO with an untested optimizer", "learning rate from scheduler before it has started")


@contextmanager
def quietly(device: torch.device) -> Iterator[None]:
    """Silence DeepSpeed's warnings while it is imported and set up, which are about deprecated parts of PyTorch."""
    with environment.deepspeed_settings(device.type, device.index), warnings.catch_warnings():
        for category in (DeprecationWarning, FutureWarning, UserWarning):
            warnings.simplefilter("ignore", category)
        yield


def _nothing() -> None:
    """Replacement for the build of an extension."""


def _is_news(record: logging.LogRecord) -> bool:
    return not any(text in record.getMessage() for text in _NO_NEWS)


@contextmanager
def without_deprecations() -> Iterator[None]:
    """Silence PyTorch's deprecation warnings about the collectives that DeepSpeed calls in a step."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`torch\.distributed\..*` is deprecated", FutureWarning)
        yield


@contextmanager
def at_work(device: torch.device) -> Iterator[None]:
    """Context for running the model, with the environment variable from which DeepSpeed reads this rank's device."""
    with without_deprecations(), environment.deepspeed_at_work(device.index):
        yield


def deepspeed(device: torch.device) -> Any:
    """Import DeepSpeed, set up for this device and the present default process group."""
    with quietly(device):
        package: Any = importlib.import_module("deepspeed")
        communication: Any = importlib.import_module("deepspeed.comm.comm")
        groups: Any = importlib.import_module("deepspeed.utils.groups")
        backend: Any = importlib.import_module("deepspeed.comm.torch")
        built: Any = importlib.import_module("deepspeed.git_version_info")
    logging.getLogger("DeepSpeed").addFilter(_is_news)
    if not built.installed_ops.get(_SHARED_MEMORY, False):
        backend.build_shm_op = _nothing
    if groups._WORLD_GROUP is not None and groups._WORLD_GROUP not in all_groups():
        groups._release_process_group_references()  # left by a finished job in this process
        communication.cdb = None
    groups.mpu = None  # the grid of an earlier pipeline engine in this process
    return package


@contextmanager
def linear_kept() -> Iterator[None]:
    """Restore `torch.nn.functional.linear`, which ZeRO stage 3 replaces and never restores."""
    linear = torch.nn.functional.linear
    try:
        yield
    finally:
        torch.nn.functional.linear = linear


def initialize(package: Any, device: torch.device, **settings: Any) -> Any:
    """A DeepSpeed engine."""
    with quietly(device):
        engine, *_ = package.initialize(**settings)
    return engine
