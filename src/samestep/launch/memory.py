"""Main memory of this host: what is there and free, and what the C library's heap keeps of it.

Each step frees what the next one allocates again. glibc gives freed memory back to the system as soon as more than a
few blocks lie at the top of its heap, and a page that comes again is cleared by the kernel and costs a page fault. So
a rank that computes on a CPU keeps freed memory for its next step.
"""

import ctypes
import platform
from collections.abc import Mapping
from pathlib import Path

import psutil

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # of glibc's malloc.h
_KEEP = 2**31 - 1  # bytes: the most that mallopt takes
_MAPPED_FROM = 2**30  # bytes of one allocation that is mapped by itself and given back when it is freed
_GROW_BY = 64 * 2**20  # bytes more than asked for, where the heap grows

_USERS_CHOICE = ("LD_PRELOAD", "GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")


def available_memory() -> int:
    """Return the bytes that a process can still allocate here."""
    free, limit = psutil.virtual_memory().available, cgroup_limit()
    return free if limit is None else min(free, limit)


def cgroup_limit(groups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that this process's cgroup may hold, version 2 or 1; None where there is no limit.

    Without a limit version 1 has the largest number of whole pages, 9223372036854771712 of 4 KiB. A limit that is
    not below the host's memory limits nothing.
    """
    for file in (groups / "memory.max", groups / "memory/memory.limit_in_bytes"):
        try:
            limit = int(file.read_text(encoding="ascii"))
        except (OSError, ValueError):  # no such file, or "max"
            continue
        return limit if limit < psutil.virtual_memory().total else None
    return None


def keep_freed_memory(variables: Mapping[str, str]) -> bool:
    """Let this process keep up to 2 GiB of freed memory. Return whether it does.

    An allocator that the user has chosen or set up in the environment's `variables` is left as it is, and so is any
    other than glibc's.
    """
    if any(variables.get(name) for name in _USERS_CHOICE) or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all(
        mallopt(parameter, value)
        for parameter, value in (
            (_M_MMAP_THRESHOLD, _MAPPED_FROM),
            (_M_TRIM_THRESHOLD, _KEEP),
            (_M_TOP_PAD, _GROW_BY),
        )
    )


def give_back_freed_memory() -> None:
    """Return the heap's free pages to the system, where the C library can."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
