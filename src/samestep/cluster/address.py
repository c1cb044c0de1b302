"""Where the ranks of other hosts reach this one: an address of this host, and the interface that has it.

A host's own name is no help: on many machines it leads to the loopback (127.0.1.1), or to another network than the
one of the job. The way towards the host where the ranks meet does help, except on that host itself.
"""

import ipaddress
import socket
import struct
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from samestep.cluster.addresses import is_loopback
from samestep.cluster.network import address_towards

if TYPE_CHECKING:
    import torch.distributed as dist

_ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR of linux/sockios.h
_KEY = "samestep-address-of-rank-"


def agreed_before_group(store: "dist.Store", rank: int, world_size: int, main: str) -> str:
    """This host's address for the ranks of others, agreed on through the store where all meet, on host `main`."""
    mine = address_towards(main)
    store.set(f"{_KEY}{rank}", mine)
    if not is_loopback(mine):
        return mine
    return _outwards(mine, (store.get(f"{_KEY}{other}").decode() for other in range(world_size)))


def agreed_in_group(main: str) -> str:
    """The same, by ranks that are in a process group already; every rank must ask."""
    import torch.distributed as dist

    mine = address_towards(main)
    all_ranks: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(all_ranks, mine)
    return _outwards(mine, all_ranks)


def _outwards(mine: str, all_ranks: Iterable[str]) -> str:
    """An address that leads out of this host, where any rank is on another host."""
    if not is_loopback(mine):
        return mine
    other = next((address for address in all_ranks if not is_loopback(address)), None)
    return mine if other is None else address_towards(other)


def interface_of(address: str) -> str | None:
    """The network interface that has an address; None where this system doesn't say."""
    if sys.platform != "linux":
        return None
    wanted = ipaddress.ip_address(address.partition("%")[0])
    if wanted.version == 6:
        return _interface_of_6(wanted.packed.hex())
    from fcntl import ioctl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            try:
                answer = ioctl(asked, _ADDRESS_OF_INTERFACE, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has none
                continue
            if answer[20:24] == wanted.packed:  # after its name, and the kind and port of a socket's address
                return name
    return None


def _interface_of_6(digits: str) -> str | None:
    table = Path("/proc/net/if_inet6")
    lines = table.read_text(encoding="ascii").splitlines() if table.exists() else []
    return next((line.split()[5] for line in lines if line.startswith(digits)), None)
