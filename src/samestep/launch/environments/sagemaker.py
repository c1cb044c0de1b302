"""A SageMaker training job: the containers that its toolkit names in SM_HOSTS."""

from typing import Any

from samestep.errors import UserError
from samestep.launch.environments.base import Cluster, FoundCluster, Host, PlaceInputs
from samestep.ranks import Variables

_HOSTS = 'a list of hosts such as ["algo-1","algo-2"]'


class SageMaker:
    """Every container is a host, of the same kind as this one, and runs the same entry point."""

    name = "sagemaker"
    sign = "SM_HOSTS and SM_CURRENT_HOST, or SM_RESOURCE_CONFIG"
    everywhere = True
    allocates = False

    def named(self, given: PlaceInputs) -> bool:
        return False

    def there(self, given: PlaceInputs) -> bool:
        return "SM_RESOURCE_CONFIG" in given.environ or all(
            name in given.environ for name in ("SM_HOSTS", "SM_CURRENT_HOST")
        )

    def find(self, given: PlaceInputs) -> FoundCluster:
        """The containers of SM_HOSTS, which all number alike: by length, then by name."""
        read = Variables(given.environ)
        config = read.json("SM_RESOURCE_CONFIG", 'a mapping with "hosts" and "current_host"')
        if config is None:
            config = {}
        if not isinstance(config, dict):
            raise UserError('SM_RESOURCE_CONFIG is no mapping; one with "hosts" and "current_host" is wanted')
        listed, source = read.json("SM_HOSTS", _HOSTS), "SM_HOSTS"
        if listed is None:
            listed, source = config.get("hosts"), '"hosts" in SM_RESOURCE_CONFIG'
        names = _names(listed, source)
        current = read.text("SM_CURRENT_HOST") or config.get("current_host")
        if current not in names:
            raise UserError(f"SM_CURRENT_HOST is {current!r}, which is none of {', '.join(names)}; SageMaker sets it")
        accelerators, cores = read.number("SM_NUM_GPUS"), read.number("SM_NUM_CPUS", 1)
        if given.device == "cpu":
            accelerators = None
        slots = accelerators or cores or given.slots[0]
        counted = "accelerators" if accelerators else "cores" if cores else given.slots[1]
        return FoundCluster(
            cluster=Cluster(
                place=self.name,
                hosts=tuple(Host(name=name, slots=slots) for name in names),
                this=names.index(current),
                job=read.first("SAGEMAKER_JOB_NAME", "TRAINING_JOB_NAME"),
            ),
            slots_from=counted,
            on_every_host=True,
            read=read.read(),
        )


def _names(hosts: Any, source: str) -> list[str]:
    """Return the hosts' names, validated, in a fixed order."""
    if not isinstance(hosts, list) or not hosts or not all(isinstance(name, str) and name for name in hosts):
        raise UserError(f"{source} is {hosts!r}; {_HOSTS} is wanted")
    if len(set(hosts)) < len(hosts):
        raise UserError(f"{source} names a host twice: {', '.join(hosts)}")
    # All containers must agree on the order, which SageMaker doesn't promise; numeric, so that algo-2 precedes
    # algo-10.
    return sorted(hosts, key=lambda name: (len(name), name))
