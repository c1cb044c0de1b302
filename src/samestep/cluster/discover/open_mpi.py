"""Processes that Open MPI's mpirun has started: each is told its own place, and how many there are."""

from samestep.cluster.cluster import Cluster, Host
from samestep.cluster.discover.place import Found, Given, Variables
from samestep.cluster.discover.unnamed import unnamed
from samestep.errors import UserError


class OpenMpi:
    """The hosts of an mpirun. With one process a host, that process is there to start the host's ranks."""

    name = "open-mpi"
    sign = "OMPI_COMM_WORLD_SIZE"

    def named(self, given: Given) -> bool:
        return False

    def there(self, given: Given) -> bool:
        return "OMPI_COMM_WORLD_SIZE" in given.environ and "OMPI_COMM_WORLD_RANK" in given.environ

    def find(self, given: Given) -> Found:
        read = Variables(given.environ)
        world_size, rank = read.needed("OMPI_COMM_WORLD_SIZE", 1), read.needed("OMPI_COMM_WORLD_RANK")
        local_size = read.needed("OMPI_COMM_WORLD_LOCAL_SIZE", 1)
        if rank >= world_size or local_size > world_size:
            raise UserError(
                f"OMPI_COMM_WORLD_RANK is {rank}, _LOCAL_SIZE {local_size} and _SIZE {world_size}; they don't fit, "
                "so mpirun has not set all of them"
            )
        read.number("OMPI_COMM_WORLD_LOCAL_RANK")
        if world_size % local_size:
            raise UserError(
                f"OMPI_COMM_WORLD_SIZE is {world_size} and OMPI_COMM_WORLD_LOCAL_SIZE {local_size}; with unequal "
                "hosts Open MPI doesn't say which is which: --hostfile would"
            )
        nodes = world_size // local_size
        # One process a host, and several hosts: a host's slots are its own to count.
        agents = local_size == 1 and nodes > 1
        slots, counted = given.host.slots if agents else (local_size, "listed")
        this = rank // local_size if agents or nodes == 1 else None
        names = unnamed(nodes, this, given.host.name)
        return Found(
            cluster=Cluster(
                place=self.name,
                hosts=tuple(Host(name=name, slots=slots) for name in names),
                this=this,
                job=read.first("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
            ),
            read=read.read(),
            slots_from=counted,
            on_every_host=agents,
        )
