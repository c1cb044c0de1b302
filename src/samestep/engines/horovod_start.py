"""Starting Horovod in ranks that something else started: they agree through torch.distributed where it meets."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch.distributed as dist

from samestep import environment
from samestep.cluster.contracts.horovod import slots_of, variables_of
from samestep.cluster.contracts.horovod_server import serving
from samestep.cluster.interfaces import interface_of
from samestep.cluster.network import LOOPBACK, address_towards
from samestep.engines.horovod_config import Settings


def start(settings: Settings) -> None:
    """Initialise Horovod, with the same ranks as torch.distributed. Every rank must call it."""
    import horovod.torch as hvd  # pyright: ignore[reportMissingImports]

    if hvd.is_initialized():
        hvd.shutdown()  # it takes its settings when it starts, and these may be another training's
    if environment.horovodrun() is not None:
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
    places: list[Any] = [None] * size
    dist.all_gather_object(
        places, (local_rank, LOOPBACK if one_host else address_towards(environment.main_address()))
    )
    slots = slots_of([number for number, _ in places])
    # Towards a rank of another host: its own name may lead rank 0 no further than to its loopback.
    elsewhere = next((address for number, address in places[1:] if number == 0), LOOPBACK)
    with serving(address_towards(elsewhere), slots) if rank == 0 else nullcontext() as served:
        agreed: list[Any] = [served]
        dist.broadcast_object_list(agreed, src=0)
        address, port = agreed[0]
        own = LOOPBACK if one_host else address_towards(address)
        yield variables_of(slots[rank], address, port, environment.gloo_interface() or interface_of(own))
