"""ClusterEnvironment: what offers hosts to a job. What it is given to look at, and what it finds.

Some environments only say how many hosts there are; in others a host finds its own name among theirs.
"""

import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol

from samestep.errors import UserError
from samestep.launch.network import is_address, is_ours
from samestep.ranks import DeviceChoice

# What a host's slots were counted from. Ranks may share cores; an accelerator, or a slot that somebody wrote down, is
# for one rank.
Slots = Literal["accelerators", "cores", "listed"]


@dataclass(frozen=True, kw_only=True)
class Host:
    """A machine that can hold ranks."""

    name: str  # by which the others reach it
    slots: int  # ranks that it can hold
    # Which of its accelerators, or of its slots where it has none, were chosen; None: the first ones.
    chosen: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """What a place offers to a job."""

    place: str  # such as "slurm": where all this was found
    hosts: tuple[Host, ...]
    this: int | None = None  # which of them this machine is; None: none of them, such as a login node
    job: str | None = None  # what the place calls the job

    @property
    def world_size(self) -> int:
        """Ranks that fill every slot."""
        return sum(host.slots for host in self.hosts)


class OwnHost:
    """The machine that this process runs on. What takes time to find out is found out when it is first asked for."""

    @cached_property
    def name(self) -> str:
        return socket.gethostname()

    @cached_property
    def accelerators(self) -> int:
        """Accelerators that PyTorch can use here, of those that a variable leaves visible."""
        from samestep.launch.device import accelerators

        return accelerators()

    @cached_property
    def cores(self) -> int:
        from samestep.launch.affinity import cores

        return cores()


@dataclass(frozen=True, kw_only=True)
class PlaceInputs:
    """What a place may look at: this process's variables, and what the user named."""

    environ: Mapping[str, str]
    hostfile: Path | None = None
    ray: str | None = None  # the address of a Ray cluster
    host: OwnHost = field(default_factory=OwnHost)
    device: DeviceChoice = "auto"  # a job on the CPU takes no slot for an accelerator

    @property
    def slots(self) -> tuple[int, Slots]:
        """Ranks that this machine holds, and what they were counted from."""
        if self.device != "cpu" and self.host.accelerators:
            return self.host.accelerators, "accelerators"
        return self.host.cores, "cores"


@dataclass(frozen=True, kw_only=True)
class Read:
    """One thing that was read, to be shown."""

    source: str  # the variable, or the file and its line
    value: str


@dataclass(frozen=True, kw_only=True)
class FoundCluster:
    """A cluster, and how it came to be known."""

    cluster: Cluster
    read: tuple[Read, ...] = ()
    slots_from: Slots = "listed"
    # Whether the place starts this very command on every host by itself: then `samestep launch` starts the ranks of
    # its own host alone. Else the one that was started reaches the other hosts over SSH.
    on_every_host: bool = False
    main_address: str | None = None  # of the first host, where the place says it; None: its name
    no_address: str | None = None  # why the first host's address is not known, and its name isn't either
    main_port: int | None = None  # a port there that the place keeps for the job


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """What every rank knows of a job whose launcher numbers its ranks and no more."""

    job: str  # names the job, and no other at the same time
    addresses: tuple[str, ...]  # rank 0's host is reached under one of them
    other: str | None = None  # another host of the job


TELL_US = "tell all ranks where to meet by MASTER_ADDR (rank 0's host) and MASTER_PORT (a free port there)"


class ClusterEnvironment(Protocol):
    """One way in which hosts are found."""

    name: str
    sign: str  # what shows that this place is there, for messages
    # Whether the place by itself runs the user's command on every host, and tells none its rank. Then a plain
    # `samestep train` on several hosts is refused: each would do the whole job.
    everywhere: bool
    # Whether its hosts were given to this job alone. Then a plain `samestep train`, which takes one of several, tells
    # of the idle ones, and how to take them.
    allocates: bool

    def named(self, given: PlaceInputs) -> bool:
        """Whether the user named it, such as by the path of a hostfile."""
        ...

    def there(self, given: PlaceInputs) -> bool:
        """Whether it shows in the variables of this process."""
        ...

    def find(self, given: PlaceInputs) -> FoundCluster:
        """The hosts that it offers. Raises UserError with the variable or line, its value and what to use instead."""
        ...


class Variables:
    """Environment variables, as they are read for a place: each that was looked at and is set is noted."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._read: dict[str, str] = {}

    def read(self) -> tuple[Read, ...]:
        return tuple(Read(source=name, value=value) for name, value in self._read.items())

    def text(self, name: str) -> str | None:
        """The value of a variable; None where it is not set, or empty."""
        value = self._environ.get(name, "").strip()
        if not value:
            return None
        self._read[name] = value
        return value

    def first(self, *names: str) -> str | None:
        """The value of the first of these variables that is set."""
        return next((value for name in names if (value := self.text(name)) is not None), None)

    def wanted(self, name: str, what: str) -> str:
        """The value of a variable without which this place says nothing. Raises UserError where there is none."""
        value = self.text(name)
        if value is None:
            raise UserError(f"{name} is {'empty' if name in self._environ else 'not set'}; {what} is wanted in it")
        return value

    def number(self, name: str, least: int = 0) -> int | None:
        """A whole number of `least` or more; None where the variable is not set."""
        text = self.text(name)
        if text is None:
            return None
        if not (text.isascii() and text.isdigit()) or int(text) < least:
            raise UserError(f"{name} is {text!r}; a whole number of {least} or more is wanted")
        return int(text)

    def needed(self, name: str, least: int = 0) -> int:
        """A variable that must be a whole number. Raises UserError where it isn't."""
        self.wanted(name, f"a whole number of {least} or more")
        number = self.number(name, least)
        assert number is not None
        return number

    def json(self, name: str, what: str) -> Any:
        """A variable's value, read as JSON; None where it is not set."""
        text = self.text(name)
        if text is None:
            return None
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            raise UserError(f"{name} is {text!r}, which is not JSON: {error.msg}; {what} is wanted") from None


def unnamed(nodes: int, this: int | None, own: str) -> list[str]:
    """This machine's own name, and for each other host its number in brackets, which can't be taken for a name."""
    return [own if index == this else f"(host {index})" for index in range(nodes)]


def shares(world_size: int, local_size: int, nodes: int, this: int) -> list[int]:
    """Ranks of each host: this one's are known, and the others share the rest as evenly as they can."""
    others, rest = nodes - 1, world_size - local_size
    if rest < others or (rest and not others):
        raise UserError(
            f"there are {world_size} ranks on {nodes} hosts, and {local_size} of them on this one; they don't fit, "
            "so the launcher has not set all of these variables"
        )
    each = [rest // others + (index < rest % others) for index in range(others)] if others else []
    return [*each[:this], local_size, *each[this:]]


_HERE = ("localhost", "127.0.0.1", "::1")


def which(names: Sequence[str], own: str) -> int | None:
    """The position of this machine, called `own`, among hosts' names or addresses; None where it is none of them.

    Names are compared whole, then without their domains. No name server is asked: that may take seconds a name.
    """
    for index, name in enumerate(names):
        if name in (own, *_HERE):
            return index
    short = [name if is_address(name) else name.partition(".")[0] for name in names]
    if short.count(own.partition(".")[0]) == 1:
        return short.index(own.partition(".")[0])
    return next((index for index, name in enumerate(names) if is_address(name) and is_ours(name)), None)
