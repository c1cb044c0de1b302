"""Ports: whether a socket can listen on the loopback, and whether the port that a user wants is free."""

import errno
import socket
from collections.abc import Iterator

from samestep.cluster.network.address import LOOPBACK
from samestep.cluster.network.holders import NOBODY_LISTENS, holders
from samestep.doctor.finding import Asked, Finding, ok, problem


def loopback(asked: Asked) -> Iterator[Finding]:
    """Ranks of one host meet on its loopback: a socket that listens, and one that reaches it."""
    try:
        with socket.create_server((LOOPBACK, 0)) as listening:
            address = listening.getsockname()
            with socket.create_connection(address, timeout=5):
                yield ok("loopback", f"a socket listens on {LOOPBACK} and is reached")
    except OSError as error:
        yield problem(
            "loopback",
            f"no socket can listen on {LOOPBACK} and be reached: {error}",
            "ip link set lo up; in a sandbox, allow TCP on the loopback",
        )


def port(asked: Asked) -> Iterator[Finding]:
    """The port that was asked for: free, or held by whom."""
    if asked.port is None:
        return
    subject = f"port {asked.port}"
    reason = _taken(asked.port)
    if reason is None:
        yield ok(subject, "free")
    elif reason == errno.EACCES:
        yield problem(subject, "only root may listen on it", "a port from 1024 on would do", held_by=[])
    else:
        held_by = holders(asked.port)
        who = ", ".join(map(str, held_by)) or NOBODY_LISTENS
        yield problem(
            subject,
            f"taken by {who}",
            "another port, or end that process; jobs that samestep starts take free ports by themselves",
            held_by=[{"pid": each.pid, "name": each.name, "user": each.user} for each in held_by],
        )


def _taken(number: int) -> int | None:
    """Why nobody can listen on a port at every address of this host, as an error number; None where one can."""
    for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind((address, number))
                probe.listen()
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return error.errno  # anything else is a family that this host doesn't have
    return None
