"""Interfaces by their names: the loopback, the one that has an address, and the one to name for gloo."""

import ipaddress
import socket
import struct
import sys
from collections.abc import Mapping
from pathlib import Path

from samestep import environment
from samestep.cluster.network.address import address_towards, is_loopback
from samestep.ranks import Ranks

_ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR of linux/sockios.h


def loopback_interface() -> str | None:
    """The interface that no other host reaches; None where the system doesn't name it."""
    names = {name for _, name in socket.if_nameindex()}
    return next((name for name in ("lo", "lo0") if name in names), None)


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


def own_name_leads_nowhere() -> bool:
    """Whether this host's name leads to its loopback, as Debian's installer has it in /etc/hosts, or to nothing."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return True
    return all(is_loopback(str(address[0])) for *_, address in found)


def for_messages(ranks: Ranks, environ: Mapping[str, str]) -> str | None:
    """The interface to name for messages between hosts; None where the one that gloo would find by itself does.

    It looks for the address that this host's name leads to. Where that is the loopback, the interface is named by
    which this host reaches the place where ranks meet.
    """
    if ranks.local_world_size == ranks.world_size:
        return None
    main = environment.given_address(environ)
    if (named := environment.place_interface(environ)) or main is None or not own_name_leads_nowhere():
        return named
    try:
        address = address_towards(main)
    except OSError:  # joining will tell
        return None
    return None if is_loopback(address) else interface_of(address)
