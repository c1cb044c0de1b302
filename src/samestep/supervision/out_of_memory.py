"""Running out of memory on purpose, within a limit that this process sets itself; the machine keeps its own."""

import resource
import sys
from pathlib import Path

_ROOM = 128 * 2**20  # bytes that may still be taken
_BLOCK = 16 * 2**20


def run_out_of_memory() -> None:
    """Allocate until there is no more. Always raises MemoryError, and leaves the limit as it was."""
    if sys.platform != "linux":
        raise MemoryError("planted: no memory is left (this system can't limit a process)")
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + _ROOM, hard))
    taken: list[bytearray] = []
    try:
        while len(taken) * _BLOCK <= _ROOM:
            taken.append(bytearray(_BLOCK))
        raise MemoryError("planted: all memory is taken")
    finally:
        taken.clear()
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
