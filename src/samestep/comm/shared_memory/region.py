"""Region: memory that the ranks of one group on one host map, freed when the last rank has ended.

Why no name: a named segment in /dev/shm stays when all its processes are killed, and fills the memory of the host. A
memfd is freed by the kernel when its last descriptor and its last mapping are gone. Other ranks open it through
/proc/<pid>/fd of rank 0, which works within one PID namespace for one user (`host_identity` asks for both).
Liveness: each rank holds a POSIX lock on byte `rank` of the file. Such locks belong to a process and end with it, so
that a peer that was killed is noticed without a heartbeat.
"""

import fcntl
import mmap
import os
import socket
import stat
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
from torch.distributed import Store

_SHARED_MEMORY = Path("/dev/shm")
# Two containers on one machine have other network namespaces, and the same boot identity.
_IDENTITIES = ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/net", "/proc/self/ns/pid", "/proc/self/ns/user")


class NoRegionError(Exception):
    """Raised if no region can be made here; the message is the reason, in one clause."""


@dataclass(frozen=True, kw_only=True)
class SharedRegion:
    """A mapped region, initially zero. Its file stays open, since the locks on it show which ranks are alive."""

    file: int  # descriptor
    memory: mmap.mmap

    def close(self) -> None:
        """Unmap the region. Its memory is given back once every rank has closed it or has ended."""
        self.memory.close()
        os.close(self.file)


def create(size: int) -> tuple[int, str]:
    """Create a file of `size` bytes in memory. Returns its descriptor, and the path at which other ranks can open it.

    On Linux the file has no name: it is gone with the last process that has it open, also after SIGKILL. Elsewhere
    it is a temporary file that `share` unlinks as soon as all ranks have opened it.
    """
    free = psutil.virtual_memory().available
    if size > free:  # the kernel would end processes to make room
        raise NoRegionError(f"{_in_words(size)} of shared memory are needed, and {_in_words(free)} are free")
    try:
        if sys.platform == "linux":
            file = os.memfd_create("samestep")
            path = f"/proc/{os.getpid()}/fd/{file}"
        else:
            folder = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None
            file, path = tempfile.mkstemp(prefix="samestep-", dir=folder)
    except OSError as error:
        raise NoRegionError(f"no file in memory can be made: {error.strerror}") from error
    try:
        os.ftruncate(file, size)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file, 0, size)  # a write to unallocated memory would raise SIGBUS
    except OSError as error:
        remove(path)
        os.close(file)
        raise NoRegionError(f"{_in_words(size)} of shared memory are needed: {error.strerror}") from error
    return file, path


def _in_words(size: int) -> str:
    """Format a size, rounded up to KiB or MiB: a group's region has less than 1 MiB, shared replicas' many GiB."""
    return f"{-(-size // (1 << 20)):,} MiB" if size >= 10 << 20 else f"{-(-size // (1 << 10)):,} KiB"


def remove(path: str) -> None:
    """Unlink a region's name, if it has one."""
    if not path.startswith("/proc/"):
        Path(path).unlink(missing_ok=True)


def share(
    store: Store, rank: int, ranks: int, size: int, make: Callable[[int], tuple[int, str]] = create
) -> SharedRegion:
    """Map the region of a group; rank 0 creates it and the others open it. Every rank of the group must call this.

    Raises NoRegionError on every rank if one of them can't map it.
    """
    file, path, problem = -1, "", ""
    if rank == 0:
        try:
            file, path = make(size)
        except NoRegionError as error:
            problem = str(error)
        store.set("region", f"{problem}\n{path}")
    told, _, path = store.get("region").decode(errors="replace").partition("\n")
    try:
        if told:
            problem = told
        elif rank != 0:
            file = _opened(path, size)
        memory = None if problem else mmap.mmap(file, size)
        if memory is not None:
            # The kernel releases the lock when this process ends for any reason.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        memory, problem = None, f"rank {rank} can't map the region of rank 0: {reason}"
    # Each rank publishes its own outcome and reads all others, so that all agree on whether there is a region.
    store.set(f"mapped/{rank}", problem)
    problems = [store.get(f"mapped/{number}").decode() for number in range(ranks)]
    if rank == 0 and not told:
        remove(path)
    first_problem = next((problem for problem in problems if problem), "")
    if first_problem or memory is None:
        if memory is not None:
            memory.close()
        if file >= 0:
            os.close(file)
        raise NoRegionError(first_problem)
    return SharedRegion(file=file, memory=memory)


def _opened(path: str, size: int) -> int:
    """Open rank 0's region. Raises OSError, and ValueError for what isn't one: the store has no password."""
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    status = os.fstat(file)
    if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and status.st_size >= size:
        return file
    os.close(file)
    raise ValueError("it is no file of this user with the region's size")


def host_identity() -> str:
    """An identifier that is equal for processes that can share memory: host name, user, boot identity, namespaces."""
    parts = [socket.gethostname(), str(os.getuid())]
    for path in map(Path, _IDENTITIES):
        if path.is_symlink():
            parts.append(str(path.readlink()))
        elif path.is_file():
            parts.append(path.read_text(encoding="ascii").strip())
    return " ".join(parts)


def host_of_each(store: Store, rank: int, ranks: int, identity: str) -> list[int]:
    """The host of each rank, numbered in the order of the ranks. Every rank of the group must call this."""
    store.set(f"host/{rank}", identity)
    names = [store.get(f"host/{number}").decode() for number in range(ranks)]
    hosts = list(dict.fromkeys(names))
    return [hosts.index(host) for host in names]
