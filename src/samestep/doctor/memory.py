"""Memory: the machine's and the container's, what was swapped out, and what processes share."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from samestep.cluster.main_memory import cgroup_limit, meminfo
from samestep.doctor.finding import Asked, Finding, in_gib, ok, problem, warning

SHARED = Path("/dev/shm")
_CONTAINER_DEFAULT = 64 * 2**20  # what a container gets where nobody asked for more
_LITTLE = 2**30


def memory(asked: Asked) -> Iterator[Finding]:
    """Main memory that is free, of the machine and of this process's cgroup."""
    sizes = meminfo()
    if not sizes:
        yield ok("memory", "not known on this system")
        return
    total, free, limit = sizes["MemTotal"], sizes.get("MemAvailable", sizes["MemFree"]), cgroup_limit()
    values: dict[str, Any] = {"total_bytes": total, "available_bytes": free, "limit_bytes": limit}
    text = f"{in_gib(free)} of {in_gib(total)} are free"
    if limit is not None and limit < total:
        text += f"; a limit of {in_gib(limit)} on this process's group"
    if min(free, limit or free) < _LITTLE:
        yield warning("memory", text, "end what else holds memory, or ask for a larger machine", **values)
    else:
        yield ok("memory", text, **values)


def swap(asked: Asked) -> Iterator[Finding]:
    """Memory that was moved to disk."""
    sizes = meminfo()
    used = sizes.get("SwapTotal", 0) - sizes.get("SwapFree", 0)
    if used > _LITTLE // 4:
        yield warning(
            "swap",
            f"{in_gib(used)} are swapped out: ranks that wait for the disk make every other rank wait",
            "end what else holds memory, or take fewer ranks, smaller micro-batches or more sharding",
            used_bytes=used,
        )
    else:
        yield ok("swap", "nothing to speak of is swapped out", used_bytes=used)


def shared_memory(asked: Asked) -> Iterator[Finding]:
    """/dev/shm, through which loader workers and NCCL hand over tensors."""
    if not SHARED.is_dir():
        yield ok("shared memory", f"there is no {SHARED} on this system")
        return
    total, _, free = shutil.disk_usage(SHARED)
    values: dict[str, Any] = {"total_bytes": total, "free_bytes": free}
    text = f"{in_gib(free)} of {in_gib(total)} are free in {SHARED}"
    if free < _CONTAINER_DEFAULT // 4:
        remedy = f"remove files that nobody uses from {SHARED}, or give the container more: docker run --shm-size=8g"
        yield problem("shared memory", text, remedy, **values)
    elif total <= _CONTAINER_DEFAULT:
        yield warning(
            "shared memory",
            f"{text}: a container's default, too little for loader workers and NCCL, which end by a bus error",
            "docker run --shm-size=8g or --ipc=host; in Kubernetes an emptyDir of medium Memory at /dev/shm",
            **values,
        )
    elif free < _LITTLE:
        remedy = f"remove files that nobody uses from {SHARED}; docker run --shm-size=8g in a container"
        yield warning("shared memory", text, remedy, **values)
    else:
        yield ok("shared memory", text, **values)
