"""Whether a rank is still there, for others of any host: a connection to a helper beside it that ends with it.

As a program, with an ADDRESS, it is that helper.
"""

import socket
import sys
import threading

from samestep.cluster.contracts.beside import start_beside


def announce(address: str) -> int:
    """Let others see that this rank is there; the port to connect to."""
    return start_beside("samestep.cluster.contracts.presence", address)


def wait_for_end(address: str, port: int) -> None:
    """Return when the rank that has announced itself there has ended, or its host has."""
    try:
        with socket.create_connection((address, port)) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.recv(1)  # nothing is ever sent
    except OSError:
        return


def main(address: str) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family, backlog=1024) as server:
        threading.Thread(target=_accept, args=(server,), daemon=True).start()
        print(server.getsockname()[1], flush=True)
        sys.stdin.read()


def _accept(server: socket.socket) -> None:
    kept = []  # a connection that nobody holds is closed
    while True:
        kept.append(server.accept()[0])


if __name__ == "__main__":
    main(*sys.argv[1:])
