"""A SageMaker training job: the containers that its toolkit names in SM_HOSTS."""

from samestep.errors import UserError
from samestep.launch.environments.base import Cluster, FoundCluster, Host, PlaceInputs
from samestep.launchers import on_sagemaker, read_sagemaker


class SageMaker:
    """Every container is a host, of the same kind as this one, and runs the same entry point."""

    name = "sagemaker"
    sign = "SM_HOSTS and SM_CURRENT_HOST, or SM_RESOURCE_CONFIG"
    everywhere = True
    allocates = False

    def named(self, inputs: PlaceInputs) -> bool:
        return False

    def there(self, inputs: PlaceInputs) -> bool:
        return on_sagemaker(inputs.environ)

    def find(self, inputs: PlaceInputs) -> FoundCluster:
        """The containers of SM_HOSTS, which all number alike: by length, then by name."""
        variables = read_sagemaker(inputs.environ)
        if variables is None:
            raise UserError(f"SageMaker's variables are wanted: {self.sign}")
        accelerators = None if inputs.device == "cpu" else variables.accelerators
        slots = accelerators or variables.cores or inputs.slots[0]
        counted = "accelerators" if accelerators else "cores" if variables.cores else inputs.slots[1]
        return FoundCluster(
            cluster=Cluster(
                place=self.name,
                hosts=tuple(Host(name=name, slots=slots) for name in variables.hosts),
                this=variables.hosts.index(variables.current),
                job=variables.job,
            ),
            slots_from=counted,
            on_every_host=True,
            read=variables.read,
        )
