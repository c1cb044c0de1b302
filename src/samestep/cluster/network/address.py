"""What an address is: one at all, one of this host's, one that no other host reaches, the one towards another."""

import ipaddress
import socket

LOOPBACK = "127.0.0.1"


def is_address(text: str) -> bool:
    """Whether a text is an address, and not a name that has one."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def is_ours(address: str) -> bool:
    """Whether an address is one of this host's: no other can be bound to."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def address_towards(host: str) -> str:
    """The address of this host from which it reaches another; nothing is sent to find it."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return probe.getsockname()[0]
