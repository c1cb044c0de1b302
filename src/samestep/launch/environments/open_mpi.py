"""Hosts of a job that Open MPI's mpirun has started: it gives each process its rank, but no list of hosts."""

import re
from collections.abc import Mapping

from samestep.errors import UserError
from samestep.launch.environments.base import (
    TELL_US,
    Cluster,
    FoundCluster,
    Host,
    PlaceInputs,
    RendezvousInfo,
    shares,
    unnamed,
)
from samestep.ranks import Variables


class OpenMpi:
    """The hosts of an mpirun. With one process on each host, that process is the host's agent."""

    name = "open-mpi"
    sign = "OMPI_COMM_WORLD_SIZE"
    everywhere = False
    allocates = False

    def named(self, given: PlaceInputs) -> bool:
        return False

    def there(self, given: PlaceInputs) -> bool:
        return "OMPI_COMM_WORLD_SIZE" in given.environ and "OMPI_COMM_WORLD_RANK" in given.environ

    def find(self, given: PlaceInputs) -> FoundCluster:
        """The hosts of an mpirun: its processes are agents where there is one a host, else ranks.

        Open MPI doesn't list the hosts, so the others stay without a name.
        """
        read = Variables(given.environ)
        world_size, rank = read.needed("OMPI_COMM_WORLD_SIZE", 1), read.needed("OMPI_COMM_WORLD_RANK")
        local_size = read.needed("OMPI_COMM_WORLD_LOCAL_SIZE", 1)
        if rank >= world_size or local_size > world_size:
            raise UserError(
                f"OMPI_COMM_WORLD_RANK is {rank}, _LOCAL_SIZE {local_size} and _SIZE {world_size}; they don't fit, "
                "so mpirun has not set all of them"
            )
        read.number("OMPI_COMM_WORLD_LOCAL_RANK")
        nodes = _nodes(read, world_size, local_size)
        # With one process on each of several hosts, every host counts its own slots.
        agents = world_size == nodes > 1
        this = rank if agents else 0 if nodes == 1 else None
        addresses = _mpirun_addresses(read) if agents else []
        names = unnamed(nodes, this, given.host.name)
        if agents:
            own, counted = given.slots
            slots = [own] * nodes
        else:
            slots, counted = shares(world_size, local_size, nodes, this or 0), "listed"
        return FoundCluster(
            cluster=Cluster(
                place=self.name,
                hosts=tuple(Host(name=name, slots=count) for name, count in zip(names, slots, strict=True)),
                this=this,
                job=_job(read),
            ),
            read=read.read(),
            slots_from=counted,
            on_every_host=agents,
            main_address=addresses[0] if len(addresses) == 1 else None,
            no_address=_no_address(addresses) if agents and len(addresses) != 1 else None,
        )


def rendezvous_info(environ: Mapping[str, str]) -> RendezvousInfo:
    """Return where the processes of an mpirun meet: on mpirun's host, whose addresses are all known."""
    read = Variables(environ)
    job = _job(read)
    if job is None:
        raise UserError(f"Open MPI's variables don't name the job; {TELL_US}")
    uri = read.text("OMPI_MCA_orte_hnp_uri") or ""
    return RendezvousInfo(job=f"open-mpi {job} {uri}", addresses=tuple(_addresses(uri)))


def _job(read: Variables) -> str | None:
    return read.first("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")


def _nodes(read: Variables, world_size: int, local_size: int) -> int:
    """Return the number of hosts: from Open MPI 4's variable, else from hosts of equal size."""
    nodes = read.number("OMPI_MCA_orte_num_nodes", 1)
    if nodes is not None:
        return nodes
    if world_size % local_size:
        raise UserError(
            f"OMPI_COMM_WORLD_SIZE is {world_size} and OMPI_COMM_WORLD_LOCAL_SIZE {local_size}; this Open MPI "
            "doesn't say how many hosts share them: --hostfile would"
        )
    return world_size // local_size


def _mpirun_addresses(read: Variables) -> list[str]:
    """Return the IPv4 addresses of mpirun's host, the first one unless the user has listed others before it."""
    uri = read.text("OMPI_MCA_orte_hnp_uri") or ""
    return [address for address in _addresses(uri) if ":" not in address]


def _no_address(addresses: list[str]) -> str:
    """Explain why --master-addr is required: several addresses, or none with Open MPI 5."""
    return (
        f"Open MPI names {' and '.join(addresses) or 'no address'} for mpirun's host, and on several hosts samestep "
        "launch wants one; use --master-addr ADDRESS, the address of the first host, or --mca "
        "oob_tcp_if_include INTERFACE, an option of mpirun; or leave samestep launch away, and start a process a rank"
    )


def _addresses(uri: str) -> list[str]:
    """Parse the addresses in mpirun's contact: 1834352640.0;tcp://10.0.0.5,10.1.0.5:37865;tcp6://[fd00::5]:56449."""
    found = re.findall(r"tcp6?://([^;]+):\d+", uri)
    return [address.strip("[]") for addresses in found for address in addresses.split(",")]
