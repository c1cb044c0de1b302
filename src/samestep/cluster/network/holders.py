"""Which sockets of this machine listen, and which process holds each: read from /proc on Linux."""

import errno
import pwd
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_LISTENING = "0A"

# By whom a port is taken on which nobody listens, as far as can be seen.
NOBODY_LISTENS = "a socket that does not listen, such as an outgoing connection or one that was closed a moment ago"


@dataclass(frozen=True, kw_only=True)
class Holder:
    """A process that holds a socket."""

    pid: int | None  # None: the process is another user's, which only root may look at
    name: str | None
    user: str

    def __str__(self) -> str:
        return (
            f"{self.name} (process {self.pid} of {self.user})"
            if self.pid is not None
            else f"a process of {self.user}"
        )


def why_not(port: int, error: OSError) -> str | None:
    """Why nobody could listen on a port, after its number; None where the error is not about the port."""
    if error.errno == errno.EACCES:
        return "is one that only root may listen on"
    if error.errno != errno.EADDRINUSE:
        return None
    return f"is taken by {', '.join(map(str, holders(port))) or NOBODY_LISTENS}"


def holders(port: int) -> list[Holder]:
    """The processes that listen on a port; of other users' processes only root sees more than whose they are."""
    users = dict(_listening(port))
    if not users:
        return []
    wanted = {f"socket:[{inode}]" for inode in users}
    found = []
    for process in sorted(_PROC.glob("[0-9]*"), key=lambda folder: int(folder.name)):
        with suppress(OSError):
            if any(_target(link) in wanted for link in (process / "fd").iterdir()):
                found.append(Holder(pid=int(process.name), name=_name(process), user=_user(process.stat().st_uid)))
    return found or [Holder(pid=None, name=None, user=_user(number)) for number in sorted(set(users.values()))]


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
    with suppress(OSError):  # closed meanwhile
        return str(link.readlink())
    return ""


def _name(process: Path) -> str:
    return (process / "comm").read_text(encoding="utf-8", errors="replace").strip()


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:  # such as in a container
        return f"user {number}"
