"""An IBM LSF job: the hosts that bsub's script was given, seen from that script or from a shell of `bsub -Is`."""

import re

from samestep.errors import UserError
from samestep.host_names import check_count, quoted, shown
from samestep.launch.environments.base import Cluster, FoundCluster, Host, PlaceInputs, which
from samestep.limits import MOST_RANKS_A_HOST, read_whole
from samestep.variables import Variables

_HOST = re.compile(r"\w[\w.-]*", re.ASCII)  # no name starts with a dash, which ssh would take for an option
_FORM = "hosts and their slots, such as host-a 4 host-b 4"


class Lsf:
    """The hosts of the job. LSF runs its command on the first of them alone."""

    name = "lsf"
    sign = "LSB_JOBID and LSB_MCPU_HOSTS"
    everywhere = False
    allocates = True

    def named(self, inputs: PlaceInputs) -> bool:
        return False

    def there(self, inputs: PlaceInputs) -> bool:
        return "LSB_JOBID" in inputs.environ and "LSB_MCPU_HOSTS" in inputs.environ

    def find(self, inputs: PlaceInputs) -> FoundCluster:
        """The hosts and slots of LSB_MCPU_HOSTS: pairs of a name and a number."""
        read = Variables(inputs.environ)
        job = read.wanted("LSB_JOBID", "the job's number")
        listed = _listed(read.wanted("LSB_MCPU_HOSTS", _FORM))
        slots, counted = inputs.slots
        this = which(list(listed), inputs.host.name)
        # LSF's slots are those requested; accelerators of all hosts are assumed to be as many as here.
        by_accelerators = counted == "accelerators" and this is not None
        return FoundCluster(
            cluster=Cluster(
                place=self.name,
                hosts=tuple(
                    Host(name=name, slots=slots if by_accelerators else count) for name, count in listed.items()
                ),
                this=this,
                job=job,
            ),
            read=read.read(),
            slots_from="accelerators" if by_accelerators else "listed",
        )


def _listed(text: str) -> dict[str, int]:
    """Return the hosts' slots in order; those of a repeated host add up."""
    words = text.split()
    slots: dict[str, int] = {}
    if len(words) % 2:
        raise UserError(f"LSB_MCPU_HOSTS is {shown(text)}, where {words[-1]} has no slots; {_FORM} are wanted")
    for name, count in zip(words[::2], words[1::2], strict=True):
        if _HOST.fullmatch(name) is None:
            raise UserError(f"LSB_MCPU_HOSTS is {shown(text)}; {quoted(name)} is no host; {_FORM} are wanted")
        number = read_whole(count) or 0
        if not 1 <= number <= MOST_RANKS_A_HOST:
            limit = f", of which a host has {MOST_RANKS_A_HOST:,} at most" if number > 0 else ""
            raise UserError(
                f"LSB_MCPU_HOSTS is {shown(text)}; {quoted(count)} is no number of slots{limit}; {_FORM} are wanted"
            )
        slots[name] = slots.get(name, 0) + number
    check_count(len(slots), "LSB_MCPU_HOSTS")
    return slots
