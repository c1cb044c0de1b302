"""A checkpoint's tensors one at a time, for commands: one is held in memory, and no ranks are needed."""

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from samestep.checkpoint.folder import Info, sums_of
from samestep.checkpoint.planner import LoadPlanner, StreamPlanner
from samestep.checkpoint.safe_index import Reader, entries, read_metadata, refusal
from samestep.checkpoint.save import write_durably
from samestep.errors import CheckpointError
from samestep.parallel.sharding import Entry
from samestep.parallel.state_shards import whole_piece
from samestep.run_folder import INFO_FILE


class Tensors:
    """The tensors of a folder in PyTorch's format, each read whole when it is asked for.

    Raises CheckpointError where the folder's index is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.index = read_metadata(folder)
        self.entries: Mapping[str, Entry] = entries(self.index)

    def read(self, name: str) -> Tensor:
        """A tensor, on the CPU. Raises CheckpointError where it can't be read."""
        entry = self.entries[name]
        value = torch.zeros(entry.shape, dtype=entry.dtype)
        try:
            with _quiet():
                dcp.load(
                    {},
                    storage_reader=Reader(self.folder, self.index),
                    planner=LoadPlanner({name: whole_piece(value)}),
                    no_dist=True,
                )
        except CheckpointException as error:
            cause = error.failures[min(error.failures)][0]
            if isinstance(cause, CheckpointError):
                raise cause from None
            raise CheckpointError(f"{self.folder}: {name} can't be read: {refusal(cause)}") from None
        return value


def write_model(folder: Path, entries: Mapping[str, Entry], read: Callable[[str], Tensor]) -> None:
    """Write a model's tensors into a new folder in PyTorch's format, each when it has been read. Raises OSError.

    Each has a file of its own: PyTorch's writer keeps the tensors of a file until the file is written.
    """
    try:
        with _quiet():
            dcp.save(
                {},
                storage_writer=dcp.FileSystemWriter(folder, single_file_per_rank=False, overwrite=False),
                planner=StreamPlanner(entries, read),
                no_dist=True,
            )
    except CheckpointException as error:
        cause: BaseException = error.failures[min(error.failures)][0]
        if isinstance(cause, RuntimeError):
            raise as_os_error(cause) from None
        raise cause from None


def as_os_error(error: RuntimeError) -> OSError:
    """What PyTorch's writer meets while a file is full, it tells as an error of its own."""
    return OSError(None, f"PyTorch could not write it, as when no space is left ({' '.join(str(error).split())})")


def write_weights(folder: Path, entries: Mapping[str, Entry], read: Callable[[str], Tensor], info: Info) -> None:
    """Write a checkpoint of a model alone into a new folder. Raises OSError."""
    write_model(folder, entries, read)
    sums = sums_of(folder, sorted(path.name for path in folder.iterdir()))
    write_durably(folder / INFO_FILE, replace(info, files=sums).to_json())


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what PyTorch tells of each save or load by a process alone."""
    logger = logging.getLogger("torch.distributed.checkpoint")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
