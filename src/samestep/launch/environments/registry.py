"""Chooses the environment whose hosts a job uses: by what the user named, or by the variables that are set."""

from collections.abc import Mapping, Sequence

from samestep.errors import UserError, closest
from samestep.host_names import check_count, check_host
from samestep.launch.environments.base import ClusterEnvironment, FoundCluster, PlaceInputs, is_unnamed
from samestep.launch.environments.hostfile import Hostfile
from samestep.launch.environments.kubernetes import PyTorchJob
from samestep.launch.environments.local import ThisMachine
from samestep.launch.environments.lsf import Lsf
from samestep.launch.environments.open_mpi import OpenMpi
from samestep.launch.environments.ray import Ray
from samestep.launch.environments.sagemaker import SageMaker
from samestep.launch.environments.slurm import Slurm
from samestep.launch.environments.torchrun import Torchrun

# The one that the user names, else the first present. A launcher inside another comes before it: torchrun in a Slurm
# job, mpirun in SageMaker.
PLACES: Sequence[ClusterEnvironment] = (
    Hostfile(),
    Torchrun(),
    OpenMpi(),
    SageMaker(),
    PyTorchJob(),
    Slurm(),
    Lsf(),
    Ray(),
    ThisMachine(),
)


def find(inputs: PlaceInputs, place: str | None = None) -> FoundCluster:
    """Find the hosts of an environment: by name, by what the user named, or the first one present.

    Raises UserError where two are named, where the one with that name doesn't show, or where what it offers can't be
    read.
    """
    named = [place_ for place_ in PLACES if place_.named(inputs)]
    if place is not None:
        return _found(_called(place, inputs, named), inputs)
    if len(named) > 1:
        raise UserError(f"{' and '.join(place_.sign for place_ in named)} both name hosts; leave one of them out")
    return _found(named[0] if named else _shown(inputs), inputs)


def _found(place: ClusterEnvironment, inputs: PlaceInputs) -> FoundCluster:
    """Find the hosts of a place, and check their names and number, whatever the place has checked itself."""
    found_cluster = place.find(inputs)
    where = f"place {place.name} ({place.sign})"
    check_count(len(found_cluster.cluster.hosts), where)
    for index, host in enumerate(found_cluster.cluster.hosts):
        if index != found_cluster.cluster.this and not is_unnamed(host.name):
            check_host(host.name, where)
    return found_cluster


def check_not_alone(environ: Mapping[str, str]) -> None:
    """Raise UserError if each of several hosts would train the whole job.

    To be called in a process that is no rank and is about to start ranks.
    """
    inputs = PlaceInputs(environ=environ)
    place = _shown(inputs)
    if not place.everywhere:
        return
    hosts = _found(place, inputs).cluster.hosts
    if len(hosts) > 1:
        raise UserError(
            f"this is one of {len(hosts)} hosts of a {place.name} job, which all run this command, and each would do "
            "the whole job for itself; put `samestep launch --` before the command, so that they train it together"
        )


def idle_hosts(environ: Mapping[str, str]) -> str | None:
    """Return a note about allocated hosts that this process would leave idle; None if there are none."""
    inputs = PlaceInputs(environ=environ)
    place = _shown(inputs)
    try:
        hosts = _found(place, inputs).cluster.hosts if place.allocates else ()
    except UserError:
        return None  # wrong variables don't matter to a training on one host
    if len(hosts) <= 1:
        return None
    return (
        f"this {place.name} job has {len(hosts)} hosts, and the training takes this one alone; "
        f"with --place {place.name} it takes all of them"
    )


def _shown(inputs: PlaceInputs) -> ClusterEnvironment:
    """Return the first environment that is present; this machine always is."""
    return next(place for place in PLACES if place.there(inputs))


def _called(name: str, inputs: PlaceInputs, named: Sequence[ClusterEnvironment]) -> ClusterEnvironment:
    """Return the environment that --place names. Raises UserError if it isn't present, or another is named too."""
    places = {place.name: place for place in PLACES}
    if name not in places:
        raise UserError(f'--place "{name}" is not known; {closest(name, places)}')
    other = next((place for place in named if place.name != name), None)
    if other is not None:
        raise UserError(f'--place "{name}" and {other.sign} are two places; leave one of them out')
    chosen = places[name]
    if not chosen.named(inputs) and not chosen.there(inputs):
        shown = [place.name for place in PLACES if place.there(inputs)]
        raise UserError(f'--place "{name}": it needs {chosen.sign}; found here: {", ".join(shown)}')
    return chosen
