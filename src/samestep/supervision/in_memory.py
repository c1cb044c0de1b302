"""A folder in the host's memory that outlives the ranks, for copies of a training's state."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

# A file system in memory, on Linux.
_IN_MEMORY = Path("/dev/shm")


@contextmanager
def folder_in_memory() -> Iterator[Path]:
    """It ends with the process that looks after the ranks."""
    place = _IN_MEMORY if _IN_MEMORY.is_dir() else None
    with TemporaryDirectory(prefix="samestep-memory-", dir=place, ignore_cleanup_errors=True) as folder:
        yield Path(folder)
