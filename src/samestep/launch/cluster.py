"""Cluster: the hosts of a job and their slots, and which of them this one is, wherever that was found."""

from dataclasses import dataclass


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
