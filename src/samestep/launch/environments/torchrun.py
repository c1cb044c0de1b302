"""The ranks that torchrun, or whatever sets its variables, has started already."""

from samestep.errors import UserError
from samestep.launch.environments.base import Cluster, FoundCluster, Host, PlaceInputs, shares, unnamed
from samestep.ranks import Variables, in_pytorchjob


class Torchrun:
    """The hosts of the ranks; torchrun tells a rank the name of the first one alone."""

    name = "torchrun"
    sign = "RANK, WORLD_SIZE and LOCAL_WORLD_SIZE"
    everywhere = False
    allocates = False

    def named(self, given: PlaceInputs) -> bool:
        return False

    def there(self, given: PlaceInputs) -> bool:
        wanted = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        return all(name in given.environ for name in wanted) and not in_pytorchjob(given.environ)

    def find(self, given: PlaceInputs) -> FoundCluster:
        """The ranks that torchrun has started already: hosts by the number of ranks on each."""
        read = Variables(given.environ)
        world_size, rank = read.needed("WORLD_SIZE", 1), read.needed("RANK")
        local_size = read.needed("LOCAL_WORLD_SIZE", 1)
        nodes = read.number("GROUP_WORLD_SIZE", 1) or -(-world_size // local_size)
        this = read.number("GROUP_RANK")
        this = rank // local_size if this is None else this
        address = read.text("MASTER_ADDR")
        read.number("LOCAL_RANK")
        if rank >= world_size or this >= nodes or local_size > world_size:
            raise UserError(
                f"RANK is {rank}, WORLD_SIZE {world_size}, LOCAL_WORLD_SIZE {local_size} and the host is {this} of "
                f"{nodes}, counted from 0; they don't fit, so torchrun has not set all of them"
            )
        names = unnamed(nodes, this, given.host.name)
        if address is not None and this != 0:
            names[0] = address
        slots = shares(world_size, local_size, nodes, this)
        return FoundCluster(
            cluster=Cluster(
                place=self.name,
                hosts=tuple(Host(name=name, slots=count) for name, count in zip(names, slots, strict=True)),
                this=this,
                job=read.text("TORCHELASTIC_RUN_ID"),
            ),
            on_every_host=True,
            main_address=address,
            main_port=read.number("MASTER_PORT", 1),
            read=read.read(),
        )
