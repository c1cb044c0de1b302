"""Which sockets of this machine listen, and which process holds each: read from /proc on Linux."""

import pwd
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_LISTENING = "0A"


@dataclass(frozen=True, kw_only=True)
class Holder:
    """A process that holds a socket."""

    pid: int
    name: str
    user: str

    def __str__(self) -> str:
        return f"{self.name} (process {self.pid} of {self.user})"


def holders(port: int) -> list[Holder]:
    """The processes that listen on a port; of other users' processes only root sees the sockets."""
    inodes = set(_listening(port))
    if not inodes:
        return []
    wanted = {f"socket:[{inode}]" for inode in inodes}
    found = []
    for process in sorted(_PROC.glob("[0-9]*"), key=lambda folder: int(folder.name)):
        with suppress(OSError):
            if any(_target(link) in wanted for link in (process / "fd").iterdir()):
                found.append(Holder(pid=int(process.name), name=_name(process), user=_user(process)))
    return found


def _listening(port: int) -> Iterator[str]:
    """The inodes of the sockets that listen on a port, at whatever address."""
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in (_PROC / "net" / table).read_text(encoding="ascii").splitlines()[1:]:
                words = line.split()  # number, local address:port, remote, state, queues, timer, ..., inode
                if words[3] == _LISTENING and int(words[1].rpartition(":")[2], 16) == port:
                    yield words[9]


def _target(link: Path) -> str:
    with suppress(OSError):  # closed meanwhile
        return str(link.readlink())
    return ""


def _name(process: Path) -> str:
    return (process / "comm").read_text(encoding="utf-8", errors="replace").strip()


def _user(process: Path) -> str:
    number = process.stat().st_uid
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:  # such as in a container
        return f"user {number}"
