"""The ranks that torchrun, or whatever sets its variables, has started already."""

from samestep.errors import UserError
from samestep.launch.environments.base import Cluster, FoundCluster, Host, PlaceInputs, shares, unnamed
from samestep.launchers import in_torchrun, read_torchrun


class Torchrun:
    """The hosts of the ranks; torchrun tells a rank the name of the first one alone."""

    name = "torchrun"
    sign = "RANK, WORLD_SIZE and LOCAL_WORLD_SIZE"
    everywhere = False
    allocates = False

    def named(self, given: PlaceInputs) -> bool:
        return False

    def there(self, given: PlaceInputs) -> bool:
        return in_torchrun(given.environ) and "LOCAL_WORLD_SIZE" in given.environ

    def find(self, given: PlaceInputs) -> FoundCluster:
        """The ranks that torchrun has started already: hosts by the number of ranks on each."""
        found = read_torchrun(given.environ)
        if found is None or found.local_world_size is None or found.node is None or found.nodes is None:
            raise UserError(f"torchrun's variables are wanted: {self.sign}")
        names = unnamed(found.nodes, found.node, given.host.name)
        if found.main_address is not None and found.node != 0:
            names[0] = found.main_address
        slots = shares(found.world_size, found.local_world_size, found.nodes, found.node)
        return FoundCluster(
            cluster=Cluster(
                place=self.name,
                hosts=tuple(Host(name=name, slots=count) for name, count in zip(names, slots, strict=True)),
                this=found.node,
                job=found.job,
            ),
            on_every_host=True,
            main_address=found.main_address,
            main_port=found.main_port,
            read=found.read,
        )
