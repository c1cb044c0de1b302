"""Limits that the system sets for a process: open files, and memory that stays in place."""

import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from samestep.doctor.finding import Asked, Finding, in_gib, ok, problem, warning

_FEW, _TOO_FEW = 4096, 256  # open files
_REMEDY = "ulimit -n 65536 before the start, LimitNOFILE= in a systemd unit, or docker run --ulimit nofile=65536"


def open_files(asked: Asked) -> Iterator[Finding]:
    """Files that a process may open; every peer and every tensor from a loader worker takes one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    values: dict[str, Any] = {"soft": soft, "hard": hard}
    if soft == resource.RLIM_INFINITY:
        yield ok("open files", "no limit", **values)
    elif soft < _TOO_FEW:
        yield problem("open files", f"a process may open {soft:,}, too few for loader workers", _REMEDY, **values)
    elif soft < _FEW:
        yield warning("open files", f"a process may open {soft:,}, few for many ranks or workers", _REMEDY, **values)
    else:
        yield ok("open files", f"a process may open {soft:,}", **values)


def locked_memory(asked: Asked) -> Iterator[Finding]:
    """Memory that a process may keep in place, which InfiniBand needs."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = soft == resource.RLIM_INFINITY
    there = any(Path("/sys/class/infiniband").glob("*"))
    text = "no limit" if unlimited else f"a process may lock {in_gib(soft)}"
    values: dict[str, Any] = {"soft_bytes": None if unlimited else soft, "infiniband": there}
    if there and not unlimited:
        remedy = "ulimit -l unlimited before the start, or docker run --ulimit memlock=-1"
        yield problem("locked memory", f"{text}, and InfiniBand needs all of a message locked", remedy, **values)
    else:
        yield ok("locked memory", text if there else f"{text}; there is no InfiniBand that needs it", **values)
