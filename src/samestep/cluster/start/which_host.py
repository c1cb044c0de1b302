"""Which of a job's hosts this one is, where the same launch is started on each."""

import socket

from samestep.cluster.discover.place import Found
from samestep.errors import UserError


def node_rank_of(found: Found, given: int | None, most: int, *, named: bool) -> int:
    """This host's number among `most`: as the user has `given` it, or as the place does where the hosts are `named`.

    Raises UserError where neither says it, and for a host that the job leaves out.
    """
    if given is not None:
        if not 0 <= given < most:
            ranks = (
                "1 host has the rank 0; that" if most == 1 else f"{most} hosts have the ranks 0 to {most - 1}; one"
            )
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
