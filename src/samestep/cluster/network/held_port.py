"""A port for a server that another program is about to start."""

import random
import socket

# Below those that systems give to outgoing connections and to sockets that ask for any port, so that none takes it
# between the moment it is let go of and the server's start; Linux: net.ipv4.ip_local_port_range, RFC 6335 elsewhere.
_PORTS = range(10000, 20000)


def held_port() -> socket.socket:
    """A socket that holds a port of every address, and does not listen; closed, it leaves the port to the server.

    Raises OSError where none is free.
    """
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        held = socket.socket()
        try:
            held.bind(("", port))
        except OSError:
            held.close()
        else:
            return held
    raise OSError(f"no port from {_PORTS[0]} to {_PORTS[-1]} is free")
