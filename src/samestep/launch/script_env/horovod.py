"""horovod: what `horovodrun --gloo` sets, with a rendezvous server that lives as long as rank 0.

Run as a program with `ADDRESS SLOTS`, the module is that server, and runs until its standard input ends.
"""

import json
import socket
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from samestep import environment
from samestep.errors import UserError
from samestep.launch.network import interface_of, own_name_leads_nowhere
from samestep.launch.script_env import torch
from samestep.launch.script_env.base import Contract, Expected, Rank, addresses, gathered, meeting
from samestep.launch.script_env.sidecar import start_module

_MODULE = "samestep.launch.script_env.horovod"  # the server as a program


def _expected(rank: Rank) -> Expected:
    """Agree on every rank's address and numbers, start the server on rank 0's host, and set its address."""
    ranks, variables = rank.ranks, torch.variables(rank)
    _check_name(rank)
    with meeting(rank, variables["MASTER_ADDR"], int(variables["MASTER_PORT"])) as store:
        all_addresses = addresses(store, rank, variables["MASTER_ADDR"])
        slots = slots_of([int(number) for number in gathered(store, "local rank", rank, str(ranks.local_rank))])
        if ranks.rank == 0:
            store.set("port", str(start_module(_MODULE, all_addresses[0], json.dumps(slots))))
        port = int(store.get("port").decode())
    interface = environment.gloo_interface(rank.environ) or interface_of(all_addresses[ranks.rank])
    return Expected(variables={**variables, **variables_of(slots[ranks.rank], all_addresses[0], port, interface)})


def _check_name(rank: Rank) -> None:
    """Raise UserError if Horovod would not find other hosts: it relies on this host's name."""
    if rank.ranks.local_world_size < rank.ranks.world_size and own_name_leads_nowhere():
        name = socket.gethostname()
        raise UserError(
            f"--engine horovod: on {name} the name {name} leads to no address that other hosts reach, and Horovod's "
            "gloo goes by it, whatever HOROVOD_GLOO_IFACE says; put its address into /etc/hosts there"
        )


Slot = Mapping[str, str | int]  # a rank's numbers, by Horovod's names


def slots_of(local_ranks: Sequence[int]) -> list[Slot]:
    """Derive each rank's numbers from the local ranks of all; ranks of a host are consecutive and start at 0."""
    hosts = [local_ranks[: rank + 1].count(0) for rank in range(len(local_ranks))]
    slots: list[Slot] = []
    for rank, (local_rank, host) in enumerate(zip(local_ranks, hosts, strict=True)):
        same_place = [other for other, number in enumerate(local_ranks) if number == local_rank]  # one on each host
        slots.append(
            {
                "hostname": f"host-{host}",  # any name that is the same for the host's ranks
                "rank": rank,
                "size": len(local_ranks),
                "local_rank": local_rank,
                "local_size": hosts.count(host),
                "cross_rank": same_place.index(rank),
                "cross_size": len(same_place),
            }
        )
    return slots


def variables_of(slot: Slot, address: str, port: int, interface: str | None) -> dict[str, str]:
    """Return a rank's variables as `horovodrun` sets them, for a server at this address."""
    return {
        **{f"HOROVOD_{name.upper()}": str(value) for name, value in slot.items()},
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        **({"HOROVOD_GLOO_IFACE": interface} if interface is not None else {}),
    }


CONTRACT = Contract(expected=_expected, package="horovod", installs="use make horovod")


@contextmanager
def serving(address: str, slots: Sequence[Slot]) -> Iterator[tuple[str, int]]:
    """Serve on a free port of one address (`horovodrun` uses all addresses); yields address and port."""
    from horovod.runner.http.http_server import RendezvousHTTPServer  # pyright: ignore[reportMissingImports]

    server = RendezvousHTTPServer((address, 0), _handler(), False)
    server.init([SimpleNamespace(**slot) for slot in slots])
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield address, server.server_port
    finally:
        server.shutdown()
        server.server_close()


def _handler() -> type:
    """Build Horovod's handler, fixed so that one finished group doesn't reset the count of another.

    Ranks report when they have found each other; when all of a group have, the server drops their addresses. Horovod
    0.28 also drops the reports of other groups then, so that their addresses stay. If Horovod starts again, a rank
    may get an address of the first start, at which no process listens.
    """
    from horovod.runner.http.http_server import RendezvousHandler  # pyright: ignore[reportMissingImports]

    class Handler(RendezvousHandler):
        def do_DELETE(self) -> None:  # noqa: N802
            """Record that a rank has finished a group's rendezvous; after all have, reset the group."""
            server: Any = self.server
            group, _, rank = self.path.removeprefix("/").partition("/")
            if group not in server.scope_size:
                super().do_DELETE()
                return
            with server.finished_list_lock, server.cache_lock:
                met = server.finished_list[group]
                if rank not in met:  # a rank reports again if the response was lost
                    met.append(rank)
                if len(met) == server.scope_size[group]:
                    met.clear()
                    server.cache.pop(group, None)
            self.send_status_code(200)

    return Handler


def main(address: str, slots: str) -> None:
    """Serve until standard input ends; print the port once the server listens."""
    with serving(address, json.loads(slots)) as (_, port):
        print(port, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
