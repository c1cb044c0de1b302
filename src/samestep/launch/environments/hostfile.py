"""A file that lists hosts, one a line, as DeepSpeed, Open MPI, MPICH and Horovod read it."""

import re
from pathlib import Path

from samestep.errors import UserError
from samestep.host_names import check_count, check_host, is_address, one_spelling, quoted
from samestep.input_files import text_of
from samestep.launch.environments.base import Cluster, FoundCluster, Host, PlaceInputs, Read, which
from samestep.limits import MOST_RANKS_A_HOST, read_whole

# A name, an IPv4 address, or an IPv6 address in brackets; then slots, as MPICH and Horovod write them. None starts
# with a dash, which ssh would take for an option.
_HOST = re.compile(
    r"(?:(?P<name>\w[\w.-]*)|\[(?P<address>[0-9A-Fa-f:.]+(?:%[\w.-]+)?)\])(?::(?P<slots>\d+))?", re.ASCII
)
_FORM = "use a line such as worker-1 slots=4"


class Hostfile:
    """Hosts listed in a file that the user named."""

    name = "hostfile"
    sign = "--hostfile FILE"
    everywhere = False
    allocates = False

    def named(self, inputs: PlaceInputs) -> bool:
        return inputs.hostfile is not None

    def there(self, inputs: PlaceInputs) -> bool:
        return False

    def find(self, inputs: PlaceInputs) -> FoundCluster:
        """The hosts of the file that was named; this one is found among them by its name."""
        assert inputs.hostfile is not None  # only used if the user named it
        hosts, read = read_hostfile(inputs.hostfile)
        this = which([host.name for host in hosts], inputs.host.name)
        return FoundCluster(cluster=Cluster(place=self.name, hosts=hosts, this=this), read=read)


def read_hostfile(file: Path) -> tuple[tuple[Host, ...], tuple[Read, ...]]:
    """The hosts of a file and the lines that name them. Raises UserError with the line.

    A line without a number of slots stands for one; the slots of a host that stands in several lines add up.
    """
    try:
        lines = text_of(file).splitlines()
    except UserError as error:
        raise UserError(f"--hostfile {error}; use a file with lines such as worker-1 slots=4") from None
    slots: dict[str, int] = {}
    spelled: dict[str, str] = {}  # as it stands first
    read = []
    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].split()
        if words:
            name, count = _line(words, f"--hostfile {file}, line {number}")
            name = spelled.setdefault(one_spelling(name), name)
            slots[name] = slots.get(name, 0) + count
            check_count(len(slots), f"--hostfile {file}")
            read.append(Read(source=f"{file}:{number}", value=" ".join(words)))
    hosts = tuple(Host(name=name, slots=count) for name, count in slots.items() if count)
    if not hosts:
        raise UserError(f"--hostfile {file}: it names no host with a slot; {_FORM}")
    return hosts, tuple(read)


def _line(words: list[str], place: str) -> tuple[str, int]:
    """The name and the slots of a line."""
    match = _HOST.fullmatch(words[0])
    if match is None:
        if "@" in words[0]:
            check_host(words[0], place)
        if words[0].strip(",").count(","):
            raise UserError(f"{place}: {quoted(words[0])} names several hosts; write each into a line of its own")
        form = f"write an IPv6 address in brackets: [{words[0]}]" if is_address(words[0]) else _FORM
        raise UserError(f"{place}: {quoted(words[0])} is no host; {form}")
    check_host(match["name"] or match["address"], place)
    counts = {} if match["slots"] is None else {"slots": _count(match["slots"], words[0], place)}
    for word in words[1:]:
        key, separator, value = word.partition("=")
        key = key.replace("-", "_")
        if not separator or key not in ("slots", "max_slots"):
            raise UserError(f'{place}: "{word}" is not known; {_FORM}, and max_slots=8 behind it')
        if key in counts:
            raise UserError(f'{place}: "{word}" says the slots of {words[0]} a second time; keep one of them')
        counts[key] = _count(value, word, place)
    slots = counts.get("slots", 1)
    if slots > counts.get("max_slots", slots):
        raise UserError(f"{place}: slots={slots} is more than max_slots={counts['max_slots']}; make one of them fit")
    return match["name"] or match["address"], slots


def _count(text: str, word: str, place: str) -> int:
    """Parse a number of slots. Raises UserError for a likely port number."""
    number = read_whole(text)
    if number is None or number < 0:
        raise UserError(f'{place}: "{word}": slots are a whole number; {_FORM}')
    if number > MOST_RANKS_A_HOST:  # a port in the wrong place
        raise UserError(
            f'{place}: "{word}" means {number} slots, and a host has {MOST_RANKS_A_HOST} at most; '
            "if it is a port, say it in OpenSSH's configuration"
        )
    return number
