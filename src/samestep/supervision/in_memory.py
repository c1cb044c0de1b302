"""A folder in the host's memory that outlives the ranks, for copies of a training's state."""

from contextlib import AbstractContextManager
from pathlib import Path

from samestep.supervision.scratch import scratch

# A file system in memory, on Linux.
_IN_MEMORY = Path("/dev/shm")


def folder_in_memory() -> AbstractContextManager[Path]:
    """It ends with the process that looks after the ranks."""
    return scratch("samestep-memory-", _IN_MEMORY if _IN_MEMORY.is_dir() else None)
