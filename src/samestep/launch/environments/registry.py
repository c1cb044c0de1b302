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


def find(given: PlaceInputs, place: str | None = None) -> FoundCluster:
    """Find the hosts of an environment: by name, by what the user named, or the first one present.

    Raises UserError where two are named, where the one with that name doesn't show, or where what it offers can't be
    read.
    """
    named = [each for each in PLACES if each.named(given)]
    if place is not None:
        return _found(_called(place, given, named), given)
    if len(named) > 1:
        raise UserError(f"{' and '.join(each.sign for each in named)} both name hosts; leave one of them out")
    return _found(named[0] if named else _shown(given), given)


def _found(place: ClusterEnvironment, given: PlaceInputs) -> FoundCluster:
    """Find the hosts of a place, and check their names and number, whatever the place has checked itself."""
    found = place.find(given)
    where = f"place {place.name} ({place.sign})"
    check_count(len(found.cluster.hosts), where)
    for index, host in enumerate(found.cluster.hosts):
        if index != found.cluster.this and not is_unnamed(host.name):
            check_host(host.name, where)
    return found


def check_not_alone(environ: Mapping[str, str]) -> None:
    """Raise UserError if each of several hosts would train the whole job.

    To be called in a process that is no rank and is about to start ranks.
    """
    given = PlaceInputs(environ=environ)
    place = _shown(given)
    if not place.everywhere:
        return
    hosts = _found(place, given).cluster.hosts
    if len(hosts) > 1:
        raise UserError(
            f"this is one of {len(hosts)} hosts of a {place.name} job, which all run this command, and each would do "
            "the whole job for itself; put `samestep launch --` before the command, so that they train it together"
        )


def idle_hosts(environ: Mapping[str, str]) -> str | None:
    """Return a note about allocated hosts that this process would leave idle; None if there are none."""
    given = PlaceInputs(environ=environ)
    place = _shown(given)
    try:
        hosts = _found(place, given).cluster.hosts if place.allocates else ()
    except UserError:
        return None  # wrong variables don't matter to a training on one host
    if len(hosts) <= 1:
        return None
    return (
        f"this {place.name} job has {len(hosts)} hosts, and the training takes this one alone; "
        f"with --place {place.name} it takes all of them"
    )


def _shown(given: PlaceInputs) -> ClusterEnvironment:
    """Return the first environment that is present; this machine always is."""
    return next(each for each in PLACES if each.there(given))


def _called(name: str, given: PlaceInputs, named: Sequence[ClusterEnvironment]) -> ClusterEnvironment:
    """Return the environment that --place names. Raises UserError if it isn't present, or another is named too."""
    places = {each.name: each for each in PLACES}
    if name not in places:
        raise UserError(f'--place "{name}" is not known; {closest(name, places)}')
    other = next((each for each in named if each.name != name), None)
    if other is not None:
        raise UserError(f'--place "{name}" and {other.sign} are two places; leave one of them out')
    chosen = places[name]
    if not chosen.named(given) and not chosen.there(given):
        shown = [each.name for each in PLACES if each.there(given)]
        raise UserError(f'--place "{name}": it needs {chosen.sign}; found here: {", ".join(shown)}')
    return chosen
