"""Whether gloo finds the interface between hosts by itself, and which one to name for it where it doesn't."""

import socket
from collections.abc import Mapping

from samestep import environment
from samestep.cluster.address import interface_of
from samestep.cluster.addresses import is_loopback
from samestep.cluster.network import address_towards
from samestep.ranks import Ranks


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
