"""What an address is: one at all, one of this host's, one that no other host reaches."""

import ipaddress
import socket


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
