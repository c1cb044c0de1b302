"""Which of some named hosts this machine is."""

import socket
from collections.abc import Sequence

_HERE = ("localhost", "127.0.0.1", "::1")


def which(names: Sequence[str], own: str) -> int | None:
    """The position of this machine, called `own`, among hosts' names; None where it is none of them.

    Names are compared first, whole and then without their domains. Where none is the same, the one is taken whose
    address belongs to this machine.
    """
    for index, name in enumerate(names):
        if name in (own, *_HERE):
            return index
    short = [name.partition(".")[0] for name in names]
    if short.count(own.partition(".")[0]) == 1 and not own[:1].isdigit():
        return short.index(own.partition(".")[0])
    return next((index for index, name in enumerate(names) if _ours(name)), None)


def _ours(name: str) -> bool:
    """Whether a name's address is one of this machine's: no other can be bound to."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(name, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True
