"""ClusterEnvironment: what offers hosts to a job. What it is given to look at, and what it finds.

Some environments only say how many hosts there are; in others a host finds its own name among theirs.
"""

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal, Protocol

from samestep.errors import UserError
from samestep.host_names import check_count
from samestep.launch.network import is_address, is_ours
from samestep.ranks import DeviceChoice
from samestep.variables import Read

# What a host's slots are counted from. Ranks may share cores; an accelerator, or a slot listed by the user, takes one
# rank.
Slots = Literal["accelerators", "cores", "listed"]


@dataclass(frozen=True, kw_only=True)
class Host:
    """A machine that can run ranks."""

    name: str  # name or address by which the other hosts reach it
    slots: int  # ranks that it can hold
    # The chosen accelerators, or slots if it has none, by index; None: the first ones.
    chosen: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The hosts that an environment offers to a job."""

    place: str  # name of the environment, such as "slurm"
    hosts: tuple[Host, ...]
    this: int | None = None  # index of this machine; None: not among them, such as a login node
    job: str | None = None  # the environment's id of the job

    @property
    def world_size(self) -> int:
        """Number of ranks that fill all slots."""
        return sum(host.slots for host in self.hosts)


class OwnHost:
    """The machine that this process runs on; slow lookups are done on first access."""

    @cached_property
    def name(self) -> str:
        return socket.gethostname()

    @cached_property
    def accelerators(self) -> int:
        """Number of visible accelerators that PyTorch can use here."""
        from samestep.launch.device import accelerators

        return accelerators()

    @cached_property
    def cores(self) -> int:
        from samestep.launch.affinity import cores

        return cores()


@dataclass(frozen=True, kw_only=True)
class PlaceInputs:
    """Inputs of an environment: this process's variables, and what the user named."""

    environ: Mapping[str, str]
    hostfile: Path | None = None
    ray: str | None = None  # the address of a Ray cluster
    host: OwnHost = field(default_factory=OwnHost)
    device: DeviceChoice = "auto"  # cpu: slots are not counted from accelerators

    @property
    def slots(self) -> tuple[int, Slots]:
        """Number of slots of this machine, and what they are counted from."""
        if self.device != "cpu" and self.host.accelerators:
            return self.host.accelerators, "accelerators"
        return self.host.cores, "cores"


@dataclass(frozen=True, kw_only=True)
class FoundCluster:
    """A cluster, and how it was found."""

    cluster: Cluster
    read: tuple[Read, ...] = ()
    slots_from: Slots = "listed"
    # Whether the environment starts this command on every host: then `samestep launch` starts the ranks of its own
    # host only. Else it starts agents on the other hosts over SSH.
    on_every_host: bool = False
    main_address: str | None = None  # of the first host, if known; None: use its name
    no_address: str | None = None  # why neither address nor name of the first host is known
    main_port: int | None = None  # a port there reserved for the job


@dataclass(frozen=True, kw_only=True)
class RendezvousInfo:
    """Rendezvous information of ranks whose launcher only numbers them."""

    job: str  # id of the job, unique at any time
    addresses: tuple[str, ...]  # candidate addresses of rank 0's host
    other: str | None = None  # another host of the job


TELL_US = "tell all ranks where to meet by MASTER_ADDR (rank 0's host) and MASTER_PORT (a free port there)"


class ClusterEnvironment(Protocol):
    """Protocol of an environment in which hosts are found."""

    name: str
    sign: str  # what identifies it, for messages
    # Whether the environment runs the user's command on every host without numbering the processes. Then `samestep
    # train` without a launcher is refused on several hosts: each would train the whole job.
    everywhere: bool
    # Whether its hosts are allocated to this job. Then `samestep train`, which uses one of several, reports the idle
    # ones and how to use them.
    allocates: bool

    def named(self, inputs: PlaceInputs) -> bool:
        """Whether the user named it, such as by a hostfile."""
        ...

    def there(self, inputs: PlaceInputs) -> bool:
        """Whether this process's variables show that it runs in this environment."""
        ...

    def find(self, inputs: PlaceInputs) -> FoundCluster:
        """Find the hosts. Raises UserError with the variable or line, its value and what to use instead."""
        ...


def unnamed(nodes: int, this: int | None, own: str) -> list[str]:
    """Name the hosts: this one by its own name, others by "(host N)", which is no valid name."""
    check_count(nodes, "the launcher")
    return [own if index == this else f"(host {index})" for index in range(nodes)]


def is_unnamed(name: str) -> bool:
    return name.startswith("(host ")


def shares(world_size: int, local_size: int, nodes: int, this: int) -> list[int]:
    """Return the ranks of each host: `local_size` on this one, the rest divided evenly among the others."""
    check_count(nodes, "the launcher")
    others, rest = nodes - 1, world_size - local_size
    if rest < others or (rest and not others):
        raise UserError(
            f"there are {world_size} ranks on {nodes} hosts, and {local_size} of them on this one; they don't fit, "
            "so the launcher has not set all of these variables"
        )
    sizes = [rest // others + (index < rest % others) for index in range(others)] if others else []
    return [*sizes[:this], local_size, *sizes[this:]]


_HERE = ("localhost", "127.0.0.1", "::1")


def which(names: Sequence[str], own: str) -> int | None:
    """Return this machine's index among hosts' names or addresses; None if it is none of them.

    Names are compared whole, then without their domains. No name server is asked: that may take seconds a name.
    """
    for index, name in enumerate(names):
        if name in (own, *_HERE):
            return index
    short = [name if is_address(name) else name.partition(".")[0] for name in names]
    if short.count(own.partition(".")[0]) == 1:
        return short.index(own.partition(".")[0])
    return next((index for index, name in enumerate(names) if is_address(name) and is_ours(name)), None)
