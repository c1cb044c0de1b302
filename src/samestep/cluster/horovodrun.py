"""Ranks that `horovodrun` started: where torch.distributed meets, agreed on through horovodrun's own server."""

import time
from datetime import timedelta

import torch.distributed as dist

from samestep.environment import HorovodRun, Ranks

_SCOPE, _KEY = "samestep", "store"


def join_process_group(
    run: HorovodRun, ranks: Ranks, backend: str, *, timeout: float = 300.0, **options: object
) -> None:
    """Join torch.distributed on a free port of rank 0's host. Raises TimeoutError where it isn't told in time."""
    from horovod.runner.http.http_client import put_data_into_kvstore, read_data_from_kvstore

    one_host = ranks.local_world_size == ranks.world_size
    if ranks.rank == 0:
        host = "127.0.0.1" if one_host else run.host
        store = dist.TCPStore(host, 0, ranks.world_size, is_master=True, wait_for_workers=False)
        put_data_into_kvstore(run.address, run.port, _SCOPE, _KEY, (host, store.port))
    else:
        place = None
        until = time.monotonic() + timeout
        while place is None:
            try:
                place = read_data_from_kvstore(run.address, run.port, _SCOPE, _KEY)
            except RuntimeError:  # rank 0 has not written it yet
                if time.monotonic() > until:
                    raise TimeoutError(f"rank 0 did not say within {timeout:.0f} s where to meet") from None
            if place is None:
                time.sleep(0.05)
        host, port = place
        store = dist.TCPStore(host, port, ranks.world_size, is_master=False, timeout=timedelta(seconds=timeout))
    dist.init_process_group(backend, store=store, rank=ranks.rank, world_size=ranks.world_size, **options)  # pyright: ignore
    dist.barrier()
    if ranks.rank == 0:
        put_data_into_kvstore(run.address, run.port, _SCOPE, _KEY, None)  # a later group meets at another port
