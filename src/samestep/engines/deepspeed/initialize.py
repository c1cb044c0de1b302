"""DeepSpeed imported and initialised: without noise, and without compiling an extension that the job doesn't need."""

import importlib
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from samestep import environment

# The extension by which DeepSpeed sums over the ranks of a host through shared memory. It would be compiled at the
# first start, and a start that is stopped meanwhile leaves a lock on which all later ones wait for ever.
_SHARED_MEMORY = "deepspeed_shm_comm"

# Warnings that say nothing to a user: of SGD under ZeRO, which tests here hold against one process, and of a
# scheduler that DeepSpeed itself asks before its first step.
_NO_NEWS = ("ZeRO with an untested optimizer", "learning rate from scheduler before it has started")


@contextmanager
def quietly(device: torch.device) -> Iterator[None]:
    """For what DeepSpeed warns of while it is imported and set up: deprecated parts of PyTorch that it uses."""
    with environment.deepspeed_settings(device.type, device.index), warnings.catch_warnings():
        for category in (DeprecationWarning, FutureWarning, UserWarning):
            warnings.simplefilter("ignore", category)
        yield


def _nothing() -> None:
    """What stands for an extension that isn't there."""


def _is_news(record: logging.LogRecord) -> bool:
    return not any(known in record.getMessage() for known in _NO_NEWS)


@contextmanager
def without_deprecations() -> Iterator[None]:
    """For steps: DeepSpeed's messages go by names that PyTorch has given up."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`torch\.distributed\..*` is deprecated", FutureWarning)
        yield


@contextmanager
def at_work(device: torch.device) -> Iterator[None]:
    """For what runs the model: DeepSpeed may ask which device this rank has, to compare ranks."""
    with without_deprecations(), environment.deepspeed_at_work(device.index):
        yield


def deepspeed(device: torch.device) -> Any:
    """The package, set up for this device and for the process group that there is at present."""
    with quietly(device):
        package: Any = importlib.import_module("deepspeed")
        communication: Any = importlib.import_module("deepspeed.comm.comm")
        groups: Any = importlib.import_module("deepspeed.utils.groups")
        backend: Any = importlib.import_module("deepspeed.comm.torch")
        built: Any = importlib.import_module("deepspeed.git_version_info")
    logging.getLogger("DeepSpeed").addFilter(_is_news)
    if not built.installed_ops.get(_SHARED_MEMORY, False):
        backend.build_shm_op = _nothing
    if groups._WORLD_GROUP is not None and groups._WORLD_GROUP not in dist.distributed_c10d._world.pg_map:
        groups._release_process_group_references()  # of a job in this process that is over
        communication.cdb = None
    groups.mpu = None  # the grid of a pipeline, which its engine leaves to all that come after it in this process
    return package


@contextmanager
def linear_kept() -> Iterator[None]:
    """Stage 3 puts a function of its own in the place of PyTorch's for linear layers, and leaves it there."""
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
