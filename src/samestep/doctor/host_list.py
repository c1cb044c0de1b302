"""The hosts that a user names, on the command line or in a file: checked before anything is done with them."""

import re
from dataclasses import dataclass
from pathlib import Path

from samestep.errors import UserError

SSH_PORT = 22

# A name or an IPv4 address, or an IPv6 address in brackets; then a port. None begins with a dash: to ssh that is an
# option, not a host.
_HOST = re.compile(r"(?:(?P<name>\w[\w.-]*)|\[(?P<address>[0-9A-Fa-f:.]+)\])(?::(?P<port>\d+))?", re.ASCII)

_FORM = "a name or an address is wanted, with a port where it is not 22: worker-1,10.0.0.7:2222,[fd00::7]"


@dataclass(frozen=True, kw_only=True)
class Host:
    name: str
    port: int = SSH_PORT

    def __str__(self) -> str:
        name = f"[{self.name}]" if ":" in self.name else self.name
        return name if self.port == SSH_PORT else f"{name}:{self.port}"


def parse_hosts(text: str) -> tuple[Host, ...]:
    """The hosts of `--hosts`. Raises UserError."""
    return tuple(_host(each.strip(), f"--hosts {text}") for each in text.split(","))


def read_hostfile(file: Path) -> tuple[Host, ...]:
    """The hosts of a file, one a line: `worker-1 slots=4`, where all behind the name is left to launchers."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise UserError(f"--hostfile {file}: {reason}") from None
    hosts = []
    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].split()
        if words:
            hosts.append(_host(words[0], f"--hostfile {file}, line {number}"))
    if not hosts:
        raise UserError(f"--hostfile {file}: it names no host; a line such as worker-1 slots=4 would do")
    return tuple(hosts)


def _host(text: str, place: str) -> Host:
    match = _HOST.fullmatch(text)
    if match is None:
        raise UserError(f'{place}: "{text}" is no host; {_FORM}')
    port = int(match["port"] or SSH_PORT)
    if not 0 < port < 65536:
        raise UserError(f'{place}: "{text}": a port is a number from 1 to 65535')
    return Host(name=match["name"] or match["address"], port=port)
