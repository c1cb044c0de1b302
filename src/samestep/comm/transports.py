"""The transports of messages: where each is available, and how to create its process group.

A transport is one entry of TABLE. `samestep comm` measures all available ones side by side, `comm demo` sends through
one of them, and `comm support` tries each.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from samestep import environment
from samestep.comm.mesh import new_group
from samestep.comm.shared_memory import backend as shared_memory
from samestep.comm.shared_memory.process_group import KernelGroup


@dataclass(frozen=True, kw_only=True)
class TransportContext:
    """What the availability of a transport depends on: the ranks' hosts, their device and its back end."""

    hosts: tuple[str, ...]  # the host of each rank
    device: torch.device  # that this rank computes on
    backend: str  # of the default process group for that device: gloo, nccl, xccl, ...

    @property
    def one_host(self) -> bool:
        return len(set(self.hosts)) == 1


@dataclass(frozen=True, kw_only=True)
class Transport:
    """One transport. Every rank makes the same calls in the same order."""

    missing: Callable[[TransportContext], str | None]  # why it is unavailable; None if it is available
    group: Callable[[TransportContext], dist.ProcessGroup]  # a new group of all ranks
    devices: Callable[
        [TransportContext], Sequence[torch.device]
    ]  # whose tensors it may take; the first one is measured
    title: Callable[[TransportContext], str] | None = None  # its name where the place decides it
    # Why a group that was made goes through another transport after all; None if it doesn't.
    fallen_back: Callable[[dist.ProcessGroup], str | None] = lambda group: None


def title_of(name: str, place: TransportContext) -> str:
    """What tables call a transport."""
    title = TABLE[name].title
    return title(place) if title is not None and TABLE[name].missing(place) is None else name


def available(place: TransportContext) -> list[str]:
    """The names of the available transports."""
    return [name for name, transport in TABLE.items() if transport.missing(place) is None]


def default(place: TransportContext) -> str:
    """The name of the transport that a job gets here by `run.transport: auto`."""
    return next(name for name in _BY_DEFAULT if name == "gloo" or TABLE[name].missing(place) is None)


# In the order in which they are taken.
_BY_DEFAULT = ("accelerator", "shared-memory", "gloo")


def _all_ranks(place: TransportContext, backend: str) -> dist.ProcessGroup:
    return new_group(range(len(place.hosts)), backend=backend)


def _cpu(place: TransportContext) -> Sequence[torch.device]:
    return [torch.device("cpu")]


def _cpu_and_own(place: TransportContext) -> Sequence[torch.device]:
    return list(dict.fromkeys([torch.device("cpu"), place.device]))


def _no_accelerator(place: TransportContext) -> str | None:
    return "the ranks compute on the CPU, whose back end is gloo" if place.device.type == "cpu" else None


def _no_gloo(place: TransportContext) -> str | None:
    return None if dist.is_gloo_available() else "this PyTorch is built without it"


def _no_shared_memory(place: TransportContext) -> str | None:
    apart = len(set(place.hosts)) == len(place.hosts)
    return "every rank is on a host of its own, and hosts share no memory" if apart else None


def _over_gloo(group: dist.ProcessGroup) -> str | None:
    return (
        None if isinstance(group, KernelGroup) else "the ranks could not map it, and their messages go through gloo"
    )


def _no_mpi(place: TransportContext) -> str | None:
    """Why MPI is unavailable: it must be the first back end of a process, and these have another one."""
    if not dist.is_mpi_available():
        return "this PyTorch is built without it"
    return "its ranks must be started by mpirun, with MPI as their first back end"


def _no_ucc(place: TransportContext) -> str | None:
    return None if dist.is_ucc_available() else "this PyTorch is built without it"


TABLE: Mapping[str, Transport] = {
    "gloo": Transport(missing=_no_gloo, group=lambda place: _all_ranks(place, "gloo"), devices=_cpu_and_own),
    "shared-memory": Transport(
        missing=_no_shared_memory,
        group=lambda place: _all_ranks(place, shared_memory.register(environment.snapshot())),
        devices=_cpu,
        fallen_back=_over_gloo,
    ),
    "accelerator": Transport(
        missing=_no_accelerator,
        group=lambda place: _all_ranks(place, place.backend),
        devices=lambda place: [place.device],
        title=lambda place: place.backend,
    ),
    "mpi": Transport(missing=_no_mpi, group=lambda place: _all_ranks(place, "mpi"), devices=_cpu),
    "ucc": Transport(missing=_no_ucc, group=lambda place: _all_ranks(place, "ucc"), devices=_cpu_and_own),
}
