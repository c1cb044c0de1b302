"""How hosts reach each other: addresses, ports, interfaces, and the stores through which they meet.

A store is bound to the address by which its own hosts reach it, not to every address of this host.
"""

import errno
import ipaddress
import os
import pwd
import random
import socket
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import psutil

from samestep import environment
from samestep.ranks import Ranks

if TYPE_CHECKING:
    import torch.distributed as dist

LOOPBACK = "127.0.0.1"
_FILES_OF_A_STORE = 12  # of its thread, and of its first connections


def is_address(text: str) -> bool:
    """Whether a text is an IP address rather than a name."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def is_ours(address: str) -> bool:
    """Whether an address belongs to this host, so that a socket can bind to it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def address_towards(host: str) -> str:
    """Return this host's address on the route to another host; sends nothing."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return probe.getsockname()[0]


# Below the ephemeral ports, so that no outgoing connection takes one between its release and the server's start.
# Linux: net.ipv4.ip_local_port_range, RFC 6335 elsewhere.
_PORTS = range(10000, 20000)


def held_port() -> socket.socket:
    """Bind a socket to a free port at every address without listening; closing it frees the port for the server.

    Raises OSError if none is free.
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


# Not psutil.net_connections: it does not give a socket's user, by which another user's process is named.
_PROC = Path("/proc")
_LISTENING = "0A"

# Description of the holder of a port on which no process visibly listens.
NOBODY_LISTENS = "a socket that does not listen, such as an outgoing connection or one that was closed a moment ago"


@dataclass(frozen=True, kw_only=True)
class PortHolder:
    """A process that holds a port."""

    pid: int | None  # None: another user's process, visible to root only
    name: str | None
    user: str

    def __str__(self) -> str:
        return (
            f"{self.name} (process {self.pid} of {self.user})"
            if self.pid is not None
            else f"a process of {self.user}"
        )


def why_not(port: int, error: OSError) -> str | None:
    """Explain why a port can't be listened on; None if the error is not about the port."""
    if error.errno == errno.EACCES:
        return "is one that only root may listen on"
    if error.errno != errno.EADDRINUSE:
        return None
    return f"is taken by {', '.join(map(str, holders(port))) or NOBODY_LISTENS}"


def holders(port: int) -> list[PortHolder]:
    """Find the processes that listen on a port; without root, other users' ones only by their user."""
    users = dict(_listening(port))
    if not users:
        return []
    sockets_used = {f"socket:[{inode}]" for inode in users}
    port_holders = []
    for process in sorted(_PROC.glob("[0-9]*"), key=lambda folder: int(folder.name)):
        with suppress(OSError):
            if any(_target(link) in sockets_used for link in (process / "fd").iterdir()):
                port_holders.append(
                    PortHolder(pid=int(process.name), name=_name(process), user=_user(process.stat().st_uid))
                )
    return port_holders or [
        PortHolder(pid=None, name=None, user=_user(number)) for number in sorted(set(users.values()))
    ]


def _listening(port: int) -> Iterator[tuple[str, int]]:
    """The inodes and the users of the sockets that listen on a port, at whatever address."""
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in (_PROC / "net" / table).read_text(encoding="ascii").splitlines()[1:]:
                # Number, local address:port, remote, state, queues, timer, retransmissions, user, timeout, inode.
                words = line.split()
                if words[3] == _LISTENING and int(words[1].rpartition(":")[2], 16) == port:
                    yield words[9], int(words[7])


def _target(link: Path) -> str:
    """Return the target of a link in /proc; empty if it is gone."""
    with suppress(OSError):  # closed meanwhile
        return str(link.readlink())
    return ""


def _name(process: Path) -> str:
    return (process / "comm").read_text(encoding="utf-8", errors="replace").strip()


def _user(number: int) -> str:
    """A user's name, or the number where there is no name."""
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:  # such as in a container
        return f"user {number}"


def loopback_interface() -> str | None:
    """Return the name of the loopback interface; None if unknown."""
    names = {name for _, name in socket.if_nameindex()}
    return next((name for name in ("lo", "lo0") if name in names), None)


_IP = (socket.AF_INET, socket.AF_INET6)


def interface_of(address: str) -> str | None:
    """Return the network interface with an address; None if unknown."""
    if sys.platform != "linux":
        return None
    ip = ipaddress.ip_address(address.partition("%")[0])
    addresses = psutil.net_if_addrs()
    for _, name in socket.if_nameindex():  # psutil also has labels of further addresses, such as eth0:1
        for entry in addresses.get(name, ()):
            if entry.family in _IP and ipaddress.ip_address(entry.address.partition("%")[0]) == ip:
                return name
    return None


def own_name_leads_nowhere() -> bool:
    """Whether this host's name resolves to its loopback, as Debian's installer sets in /etc/hosts, or not at all."""
    try:
        addresses = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return True
    return all(is_loopback(str(address[0])) for *_, address in addresses)


def for_messages(ranks: Ranks, environ: Mapping[str, str]) -> str | None:
    """Return the interface to set for messages between hosts; None to leave gloo its own choice.

    Gloo uses the address that this host's name resolves to. If that is the loopback, choose the interface on the
    route to the ranks' meeting address.
    """
    if ranks.local_world_size == ranks.world_size:
        return None
    main = environment.given_address(environ)
    if (named := environment.place_interface(environ)) or main is None or not own_name_leads_nowhere():
        return named
    try:
        address = address_towards(main)
    except OSError:  # joining will report it
        return None
    return None if is_loopback(address) else interface_of(address)


def store_at(address: str, port: int = 0) -> "dist.TCPStore":
    """A store that serves on one address: on a port, or on a free one; `.port` says which. Raises OSError.

    PyTorch would listen on every address of the host. It gives its store no password, so any process that reaches
    the port reads and writes.
    """
    import torch.distributed as dist

    _check_files()
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listening = socket.create_server((address, port), family=family, backlog=2048)
    port = listening.getsockname()[1]
    # The store closes the socket when it ends.
    return dist.TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())


def _check_files() -> None:
    """Raise OSError if this process may open hardly more files: a store's thread would end, and say nothing."""
    with ExitStack() as opened:
        for _ in range(_FILES_OF_A_STORE):
            opened.enter_context(Path(os.devnull).open("rb"))


def store_client(address: str, port: int, *, answer_within: float) -> "dist.TCPStore":
    """A connection to a store. Once it has been silent for so many seconds, every call ends with an error.

    Raises RuntimeError where no store answers there.
    """
    import torch.distributed as dist

    store = dist.TCPStore(
        address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=answer_within)
    )
    _end_when_silent(port, answer_within)
    return store


def reach(address: str, port: int, *, within: float) -> Literal["answers", "refuses", "silent"]:
    """Try to connect to a port: it answers, refuses, or is silent."""
    try:
        socket.create_connection((address, port), timeout=within).close()
    except ConnectionRefusedError:
        return "refuses"
    except OSError:
        return "silent"
    return "answers"


# Linux: what is not acknowledged is sent again at a steady pace first, so that a short break in the network costs
# no more than it lasts (man 7 tcp, tcp_thin_linear_timeouts).
_THIN_LINEAR_TIMEOUTS = 16


def _end_when_silent(port: int, seconds: float) -> None:
    """Let this process's connections to a port break when the other side is silent for so long.

    A store has no time limit for the answer to a request that it has sent: without this, a pulled cable would leave
    the caller waiting for as long as TCP sends again, a quarter of an hour.
    """
    options = {
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE): 1,  # where nothing is to be sent, ask
        (socket.IPPROTO_TCP, getattr(socket, "TCP_KEEPIDLE", None)): 1,
        (socket.IPPROTO_TCP, getattr(socket, "TCP_KEEPINTVL", None)): 1,
        (socket.IPPROTO_TCP, getattr(socket, "TCP_KEEPCNT", None)): max(1, round(seconds)),
        (socket.IPPROTO_TCP, getattr(socket, "TCP_USER_TIMEOUT", None)): round(seconds * 1000),
        (socket.IPPROTO_TCP, _THIN_LINEAR_TIMEOUTS if hasattr(socket, "TCP_USER_TIMEOUT") else None): 1,
    }
    for descriptor in sockets():
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            if connection.getpeername()[1] != port:
                continue
            for (level, option), value in options.items():
                if option is not None:
                    connection.setsockopt(level, option, value)


def sockets() -> list[int]:
    """The descriptors of this process's sockets: PyTorch does not show those of its stores."""
    numbers = []
    folder = Path("/proc/self/fd" if sys.platform == "linux" else "/dev/fd")
    for file in folder.iterdir() if folder.is_dir() else ():
        with suppress(OSError, ValueError):
            if stat.S_ISSOCK(os.fstat(int(file.name)).st_mode):
                numbers.append(int(file.name))
    return numbers


_KEY = "samestep-address-of-rank-"


def agreed_before_group(store: "dist.Store", rank: int, world_size: int, main: str) -> str:
    """Return this host's address for other hosts' ranks, exchanged through the store on host `main`."""
    own = address_towards(main)
    store.set(f"{_KEY}{rank}", own)
    if not is_loopback(own):
        return own
    return _outwards(own, (store.get(f"{_KEY}{other}").decode() for other in range(world_size)))


def agreed_in_group(main: str) -> str:
    """Like `agreed_before_group`, in an existing process group; collective."""
    import torch.distributed as dist

    own = address_towards(main)
    all_ranks: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(all_ranks, own)
    return _outwards(own, all_ranks)


def _outwards(own: str, all_ranks: Iterable[str]) -> str:
    """Return a non-loopback address of this host, if any rank is on another host."""
    if not is_loopback(own):
        return own
    other = next((address for address in all_ranks if not is_loopback(address)), None)
    return own if other is None else address_towards(other)
