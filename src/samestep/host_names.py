"""Names and addresses of hosts, checked in one place wherever they come from: files, variables, schedulers, options.

A name reaches command lines of ssh and srun, and messages on a terminal.
"""

import ipaddress
import re
from collections.abc import Iterable, Iterator, Sequence

from samestep.errors import UserError
from samestep.limits import MOST_HOSTS

_LONGEST = 253  # characters of a name in the domain name system
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_SHOWN = 60  # characters of a wrong one in a message


def check_host(name: str, where: str) -> str:
    """Return a host's name or address. Raises UserError that says what is wrong in it.

    `where`: the variable, option or line that has it.
    """
    wrong = _wrong_with(name)
    if wrong is not None:
        raise UserError(f"{where}: {quoted(name)} is no host: {wrong}")
    return name


def _wrong_with(name: str) -> str | None:
    """What is wrong with a host's name; None for one that may be used."""
    if not name:
        return "it is empty"
    if len(name) > _LONGEST:
        return f"it has {len(name)} characters, and a name has {_LONGEST} at most"
    if name.startswith("-"):
        return "it begins with a dash, as an option does"
    if "@" in name:
        return "a user's name is no part of it; OpenSSH's configuration has the user (User)"
    if _NAME.fullmatch(name) or is_address(name):
        return None
    return "a name has letters, digits, dots, dashes and underscores, and no others"


def is_address(text: str) -> bool:
    """Whether a text is an IPv4 or IPv6 address, without brackets."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    zone = getattr(address, "scope_id", None)  # of an IPv6 address: the interface
    return zone is None or _NAME.fullmatch(zone) is not None


def check_count(hosts: int, where: str) -> None:
    """Raise UserError for more hosts than any job has."""
    if hosts > MOST_HOSTS:
        raise UserError(f"{where} names {hosts:,} hosts, and a job has {MOST_HOSTS:,} at most")


def check_once(names: Sequence[str], where: str) -> None:
    """Raise UserError for a host that a list names twice, also in another spelling: it would count as two."""
    seen: dict[str, str] = {}
    for name in names:
        spelling = one_spelling(name)
        first = seen.get(spelling)
        seen[spelling] = name
        if first is not None:
            spelled = "" if first == name else f" ({first} is the same)"
            raise UserError(f"{where} names {name} twice{spelled}; name each host once")


def one_spelling(name: str) -> str:
    """A host's name without capital letters and a dot at its end, which don't count; an address in its short form."""
    name = name.lower().removesuffix(".")
    may_be_address = ":" in name or name[:1].isdigit()  # to try it takes long, and lists are
    return str(ipaddress.ip_address(name)) if may_be_address and is_address(name) else name


def checked_hosts(names: Iterable[str], where: str) -> Iterator[str]:
    """Check hosts as they are listed, and their number. Raises UserError."""
    for number, name in enumerate(names, start=1):
        check_count(number, where)
        yield check_host(name, where)


def shown(value: object) -> str:
    """A wrong value as it stands in a message: with its control characters written out, and never long."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def quoted(text: str) -> str:
    """The same of a part of a text, in double quotes."""
    return f'"{shown(text)[1:].removesuffix(chr(39))}"'
