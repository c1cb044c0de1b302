"""This machine alone: as many slots as it has accelerators, or cores where it has none."""

from samestep import environment
from samestep.launch.environments.base import Cluster, FoundCluster, Host, PlaceInputs, Read


class ThisMachine:
    """The fallback when no other environment offers hosts: this machine."""

    name = "this-machine"
    sign = "always there"
    everywhere = False
    allocates = False

    def named(self, inputs: PlaceInputs) -> bool:
        return False

    def there(self, inputs: PlaceInputs) -> bool:
        return True

    def find(self, inputs: PlaceInputs) -> FoundCluster:
        slots, counted = inputs.slots
        read = [Read(source=counted, value=str(slots))]
        if (visible := environment.visible_devices(inputs.environ)) is not None:
            read.append(Read(source=visible.variable, value=",".join(visible.devices)))
        host = Host(name="localhost", slots=slots)
        return FoundCluster(
            cluster=Cluster(place=self.name, hosts=(host,), this=0), read=tuple(read), slots_from=counted
        )
