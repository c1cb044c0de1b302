"""Which of a job's hosts this one is, where a launch is started on each; and whether it is started once on each."""

import socket

from samestep import environment
from samestep.cluster.discover.place import Found
from samestep.errors import UserError


def node_rank_of(found: Found, given: int | None, most: int, *, named: bool) -> int:
    """This host's number among `most`: as the user has `given` it, or as the place does where the hosts are `named`.

    Raises UserError where neither says it, and for a host that the job leaves out.
    """
    if given is not None:
        if not 0 <= given < most:
            there = f"{most} hosts have the ranks 0 to {most - 1}; one of them"
            ranks = "1 host has the rank 0; that" if most == 1 else there
            raise UserError(f"--node-rank is {given}, and {ranks} would do, or more hosts by --num-nodes")
        return given
    this = found.cluster.this
    if this is not None and this < most and (named or most == 1):
        return this
    if found.on_every_host or most == 1 or (this is not None and this >= most):
        names = ", ".join(host.name for host in found.cluster.hosts[:most])
        raise UserError(
            f"this host, {socket.gethostname()}, is none of the job's: {names}; leave it out of the start, "
            "change --include, --exclude or --num-nodes, or say by --node-rank which it is"
        )
    raise UserError(f"which of the {most} hosts is this? --node-rank 0 to {most - 1} would say it")


_STARTED_BY = {"open-mpi": "mpirun", "pmi": "mpirun", "slurm": "srun"}


def check_one_a_host() -> None:
    """Raise UserError where a launcher started several of this process on a host: each would start all ranks."""
    ranks = environment.ranks()
    # Where the launcher doesn't say how many are on this host, they may be on as many hosts.
    unsaid = ranks is not None and ranks.local_world_size == ranks.world_size and not ranks.one_host
    if ranks is None or ranks.local_world_size < 2 or unsaid:
        return
    launcher = _STARTED_BY.get(ranks.launcher, ranks.launcher)
    raise UserError(
        f"{launcher} started {ranks.local_world_size} processes on this host, and each would start all of its ranks; "
        "one a host (srun --ntasks-per-node=1, mpirun --map-by ppr:1:node, torchrun --nproc-per-node 1), or the "
        "command without samestep launch, would do"
    )
