"""Starting Horovod in ranks that something else started: they agree through torch.distributed where it meets."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from samestep import environment
from samestep.cluster.network import LOOPBACK, address_towards, loopback_interface
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
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer  # pyright: ignore[reportMissingImports]

    ranks = environment.ranks()
    local_rank, local_size = (ranks.local_rank, ranks.local_world_size) if ranks else (0, 1)
    rank, size = dist.get_rank(), dist.get_world_size()
    one_host = local_size == size
    places: list[Any] = [None] * size
    dist.all_gather_object(
        places, (local_rank, LOOPBACK if one_host else address_towards(environment.main_address()))
    )
    local_ranks = [number for number, _ in places]
    server = None
    agreed: list[Any] = [None]
    if rank == 0:
        # Towards a rank of another host: its own name may lead rank 0 no further than to its loopback.
        elsewhere = next((address for number, address in places[1:] if number == 0), LOOPBACK)
        server = RendezvousHTTPServer((address_towards(elsewhere), 0), RendezvousHandler, False)
        server.init([])
        threading.Thread(target=server.serve_forever, daemon=True).start()
        agreed = [server.server_address[:2]]
    dist.broadcast_object_list(agreed, src=0)
    address, port = agreed[0]
    same_place = [other for other in range(size) if local_ranks[other] == local_rank]  # one a host
    variables = {
        "HOROVOD_RANK": str(rank),
        "HOROVOD_SIZE": str(size),
        "HOROVOD_LOCAL_RANK": str(local_rank),
        "HOROVOD_LOCAL_SIZE": str(local_size),
        "HOROVOD_CROSS_RANK": str(same_place.index(rank)),
        "HOROVOD_CROSS_SIZE": str(len(same_place)),
        "HOROVOD_HOSTNAME": f"host-{local_ranks[: rank + 1].count(0)}",  # only a name that its ranks share
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
    }
    interface = environment.gloo_interface() or (loopback_interface() if one_host else None)
    if interface is not None:
        variables["HOROVOD_GLOO_IFACE"] = interface
    try:
        yield variables
    finally:
        if server is not None:
            server.shutdown()
            server.server_close()
