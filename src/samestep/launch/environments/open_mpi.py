"""Hosts of a job that Open MPI's mpirun has started: it gives each process its rank, but no list of hosts."""

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
from samestep.launchers import MpiVariables, in_open_mpi, read_open_mpi


class OpenMpi:
    """The hosts of an mpirun. With one process on each host, that process is the host's agent."""

    name = "open-mpi"
    sign = "OMPI_COMM_WORLD_SIZE"
    everywhere = False
    allocates = False

    def named(self, inputs: PlaceInputs) -> bool:
        return False

    def there(self, inputs: PlaceInputs) -> bool:
        return in_open_mpi(inputs.environ)

    def find(self, inputs: PlaceInputs) -> FoundCluster:
        """The hosts of an mpirun: its processes are agents where there is one a host, else ranks.

        Open MPI doesn't list the hosts, so the others stay without a name.
        """
        variables = _read(inputs.environ)
        nodes = _nodes(variables)
        # With one process on each of several hosts, every host counts its own slots.
        agents = variables.world_size == nodes > 1
        this = variables.rank if agents else 0 if nodes == 1 else None
        # The first of mpirun's addresses is the one to use, unless the user has listed others before it.
        addresses = [address for address in variables.addresses if ":" not in address] if agents else []
        names = unnamed(nodes, this, inputs.host.name)
        if agents:
            own, counted = inputs.slots
            slots = [own] * nodes
        else:
            slots, counted = shares(variables.world_size, variables.local_world_size, nodes, this or 0), "listed"
        return FoundCluster(
            cluster=Cluster(
                place=self.name,
                hosts=tuple(Host(name=name, slots=count) for name, count in zip(names, slots, strict=True)),
                this=this,
                job=variables.job,
            ),
            read=variables.read,
            slots_from=counted,
            on_every_host=agents,
            main_address=addresses[0] if len(addresses) == 1 else None,
            no_address=_no_address(addresses) if agents and len(addresses) != 1 else None,
        )


def rendezvous_info(environ: Mapping[str, str]) -> RendezvousInfo:
    """Return where the processes of an mpirun meet: on mpirun's host, whose addresses are all known."""
    variables = _read(environ)
    if variables.job is None:
        raise UserError(f"Open MPI's variables don't name the job; {TELL_US}")
    return RendezvousInfo(job=f"open-mpi {variables.job} {variables.contact}", addresses=variables.addresses)


def _read(environ: Mapping[str, str]) -> MpiVariables:
    variables = read_open_mpi(environ)
    if variables is None:
        raise UserError(f"Open MPI's variables are wanted: {OpenMpi.sign} and the others that its mpirun sets")
    return variables


def _nodes(variables: MpiVariables) -> int:
    """Return the number of hosts: from Open MPI 4's variable, else from hosts of equal size."""
    if variables.nodes is not None:
        return variables.nodes
    world_size, local_size = variables.world_size, variables.local_world_size
    if world_size % local_size:
        raise UserError(
            f"OMPI_COMM_WORLD_SIZE is {world_size} and OMPI_COMM_WORLD_LOCAL_SIZE {local_size}; this Open MPI "
            "doesn't say how many hosts share them: --hostfile would"
        )
    return world_size // local_size


def _no_address(addresses: list[str]) -> str:
    """Explain why --master-addr is required: several addresses, or none with Open MPI 5."""
    return (
        f"Open MPI names {' and '.join(addresses) or 'no address'} for mpirun's host, and on several hosts samestep "
        "launch wants one; use --master-addr ADDRESS, the address of the first host, or --mca "
        "oob_tcp_if_include INTERFACE, an option of mpirun; or leave samestep launch away, and start a process a rank"
    )
