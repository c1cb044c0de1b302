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

    def named(self, given: PlaceInputs) -> bool:
        return False

    def there(self, given: PlaceInputs) -> bool:
        return on_sagemaker(given.environ)

    def find(self, given: PlaceInputs) -> FoundCluster:
        """The containers of SM_HOSTS, which all number alike: by length, then by name."""
        found = read_sagemaker(given.environ)
        if found is None:
            raise UserError(f"SageMaker's variables are wanted: {self.sign}")
        accelerators = None if given.device == "cpu" else found.accelerators
        slots = accelerators or found.cores or given.slots[0]
        counted = "accelerators" if accelerators else "cores" if found.cores else given.slots[1]
        return FoundCluster(
            cluster=Cluster(
                place=self.name,
                hosts=tuple(Host(name=name, slots=slots) for name in found.hosts),
                this=found.hosts.index(found.current),
                job=found.job,
            ),
            slots_from=counted,
            on_every_host=True,
            read=found.read,
        )
