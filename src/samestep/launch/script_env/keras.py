"""keras: TF_CONFIG, from which TensorFlow's strategies of several workers know each other."""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from samestep.errors import UserError
from samestep.launch.network import held_port
from samestep.launch.script_env import sidecar, torch
from samestep.launch.script_env.base import Contract, Expected, Rank, addresses, gathered, meeting, whole_number

if TYPE_CHECKING:
    from torch.distributed import Store

CHIEF, WORKER, SERVER = "chief", "worker", "ps"  # TensorFlow's names

# By default TensorFlow starts as many threads as the host has cores, in every rank.
_THREADS = ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")


def _expected(rank: Rank) -> Expected:
    """Build TF_CONFIG: all ranks' addresses and ports, exchanged through a store, and this rank's task."""
    variables = torch.variables(rank)
    kinds = kinds_of(rank.ranks.world_size, int(rank.options.get("servers", 0)))
    # Each rank holds its port until all have theirs, so that ranks of a host get different ones.
    with (
        meeting(rank, variables["MASTER_ADDR"], int(variables["MASTER_PORT"])) as store,
        held_port() as held,
    ):
        all_addresses = addresses(store, rank, variables["MASTER_ADDR"])
        ports = gathered(store, "port", rank, str(held.getsockname()[1]))
        chief = _sidecar_of_chief(store, rank, all_addresses[0]) if kinds[0] == CHIEF else None
    places = [f"{address}:{port}" for address, port in zip(all_addresses, ports, strict=True)]
    threads = {name: rank.environ.get(name, str(rank.threads)) for name in _THREADS}
    return Expected(
        variables={**variables, **threads, "TF_CONFIG": json.dumps(config(rank.ranks.rank, kinds, places))},
        sidecar=chief,
    )


def _sidecar_of_chief(store: "Store", rank: Rank, address: str) -> tuple[str, int] | None:
    """Return where other ranks detect the chief's end: workers and servers never end by themselves."""
    if rank.ranks.rank == 0:
        store.set("sidecar", str(sidecar.start(address)))
        return None
    return address, int(store.get("sidecar").decode())


def kinds_of(ranks: int, servers: int) -> list[str]:
    """Return each rank's task: workers only; with parameter servers, a chief, workers, then the servers."""
    if not servers:
        return [WORKER] * ranks
    if ranks < servers + 2:
        raise UserError(
            f"--engine keras:servers={servers}: {ranks} ranks are too few for a chief, a worker and {servers} "
            f"server{'s' if servers > 1 else ''}; use {servers + 2} or more"
        )
    return [CHIEF, *[WORKER] * (ranks - 1 - servers), *[SERVER] * servers]


def config(rank: int, kinds: Sequence[str], places: Sequence[str]) -> dict[str, object]:
    """What TF_CONFIG holds for a rank: the addresses of each kind of task, and which of them it is."""
    cluster: dict[str, list[str]] = {}
    for kind, place in zip(kinds, places, strict=True):
        cluster.setdefault(kind, []).append(place)
    return {"cluster": cluster, "task": {"type": kinds[rank], "index": kinds[:rank].count(kinds[rank])}}


def _check(options: Mapping[str, str]) -> None:
    if "servers" in options:
        whole_number("servers", options["servers"], least=0)


CONTRACT = Contract(
    expected=_expected,
    options={"servers": "parameter servers among the ranks, for ParameterServerStrategy; 0 by default"},
    check=_check,
)
