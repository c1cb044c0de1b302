"""Host: whether all ranks of a group share one, which is asked of the ranks themselves."""

import os
import socket
from pathlib import Path

from torch.distributed import Store

# Two containers on one machine have other network namespaces, and the same boot identity.
_IDENTITIES = ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/net", "/proc/self/ns/pid", "/proc/self/ns/user")


def host_identity() -> str:
    """What is the same for two processes that can share memory: the machine's start, its namespaces, the user."""
    found = [socket.gethostname(), str(os.getuid())]
    for path in map(Path, _IDENTITIES):
        if path.is_symlink():
            found.append(str(path.readlink()))
        elif path.is_file():
            found.append(path.read_text(encoding="ascii").strip())
    return " ".join(found)


def share_a_host(store: Store, rank: int, ranks: int) -> bool:
    """Whether the ranks of a group all run on one host. Every rank of the group must call this."""
    store.set(f"host/{rank}", host_identity())
    return len({store.get(f"host/{each}") for each in range(ranks)}) == 1
