"""Starting Horovod in ranks that something else started: they agree through torch.distributed where it meets."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from samestep import environment
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
    server = None
    if rank == 0:
        server = RendezvousHTTPServer(("127.0.0.1" if one_host else "", 0), RendezvousHandler, False)
        server.init([])
        threading.Thread(target=server.serve_forever, daemon=True).start()
    local_ranks: list[int] = [0] * size
    dist.all_gather_object(local_ranks, local_rank)
    agreed = [server.server_address[1] if server is not None else None]
    dist.broadcast_object_list(agreed, src=0)
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
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1" if one_host else environment.main_address(),
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(agreed[0]),
    }
    interface = _loopback() if one_host else environment.gloo_interface()
    if interface is not None:
        variables["HOROVOD_GLOO_IFACE"] = interface
    try:
        yield variables
    finally:
        if server is not None:
            server.shutdown()
            server.server_close()


def _loopback() -> str | None:
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
