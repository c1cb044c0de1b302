"""Starting Horovod in ranks that something else started: they agree through torch.distributed where it meets."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch.distributed as dist

from samestep import environment
from samestep.cluster.contracts.horovod import slots_of, variables_of
from samestep.cluster.contracts.horovod_server import serving
from samestep.cluster.network.address import LOOPBACK
from samestep.cluster.network.agreed import agreed_in_group
from samestep.cluster.network.interface import interface_of, own_name_leads_nowhere
from samestep.engines.horovod_config import Settings
from samestep.errors import UserError


def start(settings: Settings) -> None:
    """Initialise Horovod, with the same ranks as torch.distributed. Every rank must call it."""
    import horovod.torch as hvd  # pyright: ignore[reportMissingImports]

    if hvd.is_initialized():
        hvd.shutdown()  # it takes its settings when it starts, and these may be another training's
    if settings.messages == "mpi" or environment.horovodrun() is not None:  # Horovod knows its ranks by itself
        with environment.given(settings.variables()):
            hvd.init()
    else:
        with _rendezvous() as variables, environment.given({**variables, **settings.variables()}):
            hvd.init()
            dist.barrier()  # the server stays until every rank has met the others
    assert (hvd.rank(), hvd.size()) == (dist.get_rank(), dist.get_world_size())


@contextmanager
def _rendezvous() -> Iterator[dict[str, str]]:
    """What `horovodrun` would have put into this rank's environment; the server where ranks meet is on rank 0."""
    ranks = environment.ranks()
    local_rank, local_size = (ranks.local_rank, ranks.local_world_size) if ranks else (0, 1)
    rank, size = dist.get_rank(), dist.get_world_size()
    one_host = local_size == size
    own = LOOPBACK if one_host else agreed_in_group(environment.main_address())
    places: list[Any] = [None] * size
    nowhere = not one_host and own_name_leads_nowhere()
    dist.all_gather_object(places, (local_rank, socket.gethostname() if nowhere else None))
    local_ranks = [number for number, _ in places]
    if (name := next((host for _, host in places if host is not None), None)) is not None:
        raise UserError(
            f"engine horovod: on {name} the name {name} leads to no address that other hosts reach, and Horovod's "
            "gloo goes by it; its address in /etc/hosts there would do"
        )
    slots = slots_of(local_ranks)
    with serving(own, slots) if rank == 0 else nullcontext() as served:
        agreed: list[Any] = [served]
        dist.broadcast_object_list(agreed, src=0)
        address, port = agreed[0]
        yield variables_of(slots[rank], address, port, environment.gloo_interface() or interface_of(own))
