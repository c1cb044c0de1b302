"""Read and write a checkpoint's tensors one at a time, in one process without a process group, for commands."""

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

from samestep.checkpoint.folder import sums_of
from samestep.checkpoint.info import Info
from samestep.checkpoint.plain_files import open_plain
from samestep.checkpoint.planner import LoadPlanner, StreamPlanner
from samestep.checkpoint.safe_index import SafeReader, entries, files_of, read_metadata, refusal
from samestep.checkpoint.save import write_durably
from samestep.errors import CheckpointError
from samestep.parallel.sharding import Entry
from samestep.parallel.state_shards import whole_piece
from samestep.run_folder import INFO_FILE


class Tensors:
    """The tensors of a folder in PyTorch's distributed checkpoint format; `read` loads one of them whole.

    Raises CheckpointError if the folder's index is damaged, or a file that it names is missing or no plain one.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.index = read_metadata(folder)
        for name in files_of(self.index):
            _check_there(folder / name)
        self.entries: Mapping[str, Entry] = entries(self.index)

    def read(self, name: str) -> Tensor:
        """Read a tensor onto the CPU. Raises CheckpointError if it can't be read."""
        entry = self.entries[name]
        value = torch.zeros(entry.shape, dtype=entry.dtype)
        try:
            with _quiet():
                dcp.load(
                    {},
                    storage_reader=SafeReader(self.folder, self.index),
                    planner=LoadPlanner({name: whole_piece(value)}),
                    no_dist=True,
                )
        except CheckpointException as error:
            cause = error.failures[min(error.failures)][0]
            if isinstance(cause, CheckpointError):
                raise cause from None
            raise CheckpointError(f"{self.folder}: {name} can't be read: {refusal(cause)}") from None
        return value


def _check_there(file: Path) -> None:
    """Raise CheckpointError unless a file is there and can be opened."""
    try:
        open_plain(file).close()
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing, and the index next to it says that it holds tensors") from None


def write_model(folder: Path, entries: Mapping[str, Entry], read: Callable[[str], Tensor]) -> None:
    """Write a model's tensors into a new folder in PyTorch's format. Raises OSError.

    `read` is called for each tensor just before it is written. Each tensor has its own file, since PyTorch's writer
    keeps all tensors of a file in memory until the file is written.
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
    """Convert the RuntimeError that PyTorch's writer raises on a full disk to an OSError."""
    return OSError(None, f"PyTorch could not write it, as when no space is left ({' '.join(str(error).split())})")


def write_weights(folder: Path, entries: Mapping[str, Entry], read: Callable[[str], Tensor], info: Info) -> None:
    """Write a checkpoint of model weights, without optimizer state, into a new folder. Raises OSError."""
    write_model(folder, entries, read)
    sums = sums_of(folder, sorted(path.name for path in folder.iterdir()))
    write_durably(folder / INFO_FILE, replace(info, files=sums).to_json())


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence PyTorch's warnings and log messages about checkpointing in a single process."""
    logger = logging.getLogger("torch.distributed.checkpoint")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
