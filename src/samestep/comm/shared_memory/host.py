"""Host: which ranks of a group share one, which is asked of the ranks themselves."""

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


def host_of_each(store: Store, rank: int, ranks: int, identity: str) -> list[int]:
    """The host of each rank, numbered in the order of the ranks. Every rank of the group must call this."""
    store.set(f"host/{rank}", identity)
    found = [store.get(f"host/{each}").decode() for each in range(ranks)]
    hosts = list(dict.fromkeys(found))
    return [hosts.index(each) for each in found]
