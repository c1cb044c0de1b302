"""The starters, by the place where the hosts were found."""

from collections.abc import Mapping

from samestep.cluster.start import ray, srun, ssh
from samestep.cluster.start.starter import Starter

STARTERS: Mapping[str, Starter] = {
    "slurm": srun.STARTER,
    "ray": ray.STARTER,
}


def starter_of(place: str) -> Starter:
    """How the agents of a place's hosts are brought up: by SSH, unless it has a way of its own."""
    return STARTERS.get(place, ssh.STARTER)
