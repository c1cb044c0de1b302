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

    def named(self, inputs: PlaceInputs) -> bool:
        return False

    def there(self, inputs: PlaceInputs) -> bool:
        return in_torchrun(inputs.environ) and "LOCAL_WORLD_SIZE" in inputs.environ

    def find(self, inputs: PlaceInputs) -> FoundCluster:
        """The ranks that torchrun has started already: hosts by the number of ranks on each."""
        variables = read_torchrun(inputs.environ)
        if (
            variables is None
            or variables.local_world_size is None
            or variables.node is None
            or variables.nodes is None
        ):
            raise UserError(f"torchrun's variables are wanted: {self.sign}")
        names = unnamed(variables.nodes, variables.node, inputs.host.name)
        if variables.main_address is not None and variables.node != 0:
            names[0] = variables.main_address
        slots = shares(variables.world_size, variables.local_world_size, variables.nodes, variables.node)
        return FoundCluster(
            cluster=Cluster(
                place=self.name,
                hosts=tuple(Host(name=name, slots=count) for name, count in zip(names, slots, strict=True)),
                this=variables.node,
                job=variables.job,
            ),
            on_every_host=True,
            main_address=variables.main_address,
            main_port=variables.main_port,
            read=variables.read,
        )
