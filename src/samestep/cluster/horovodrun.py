"""Ranks that `horovodrun` started: where torch.distributed meets, agreed on through horovodrun's own server."""

import time
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from samestep.cluster.network.address import LOOPBACK, address_towards
from samestep.cluster.network.store import store_at
from samestep.environment import HorovodRun
from samestep.ranks import Ranks

_SCOPE, _KEY = "samestep", "store"


def join_process_group(
    run: HorovodRun, ranks: Ranks, backend: str, *, timeout: float = 300.0, **options: object
) -> None:
    """Join torch.distributed on a free port of rank 0's host. Raises TimeoutError where it isn't told in time.

    Ranks of several hosts meet at the address from which rank 0 reaches horovodrun's server, as all of them do.
    """
    from horovod.runner.http.http_client import put_data_into_kvstore  # pyright: ignore[reportMissingImports]

    if ranks.rank == 0:
        host = LOOPBACK if ranks.one_host else address_towards(run.address)
        store = store_at(host)
        put_data_into_kvstore(run.address, run.port, _SCOPE, _KEY, (host, store.port))
    else:
        host, port = _meeting_place(run, timeout)
        store = dist.TCPStore(host, port, ranks.world_size, is_master=False, timeout=timedelta(seconds=timeout))
    dist.init_process_group(backend, store=store, rank=ranks.rank, world_size=ranks.world_size, **options)  # pyright: ignore
    dist.barrier()
    if ranks.rank == 0:
        put_data_into_kvstore(run.address, run.port, _SCOPE, _KEY, None)  # a later group meets at another port


def _meeting_place(run: HorovodRun, timeout: float) -> tuple[str, int]:
    """The host and the port that rank 0 wrote down, as soon as it has."""
    from horovod.runner.http.http_client import read_data_from_kvstore  # pyright: ignore[reportMissingImports]

    until = time.monotonic() + timeout
    while time.monotonic() < until:
        with suppress(RuntimeError):  # nothing is written yet
            place = read_data_from_kvstore(run.address, run.port, _SCOPE, _KEY)
            if place is not None:
                return place
        time.sleep(0.05)
    raise TimeoutError(f"rank 0 did not say within {timeout:.0f} s where to meet")
