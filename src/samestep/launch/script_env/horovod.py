"""horovod: what `horovodrun --gloo` sets, with a server for its ranks that lives as long as rank 0."""

import json
import socket
from collections.abc import Mapping, Sequence

from samestep import environment
from samestep.errors import UserError
from samestep.launch.network import interface_of, own_name_leads_nowhere
from samestep.launch.script_env import torch
from samestep.launch.script_env.base import Contract, Expected, Rank, addresses, gathered, meeting
from samestep.launch.script_env.sidecar import start_beside

_SERVER = "samestep.launch.script_env.horovod_server"


def _expected(rank: Rank) -> Expected:
    ranks, variables = rank.ranks, torch.variables(rank)
    _check_name(rank)
    with meeting(rank, variables["MASTER_ADDR"], int(variables["MASTER_PORT"])) as store:
        found = addresses(store, rank, variables["MASTER_ADDR"])
        slots = slots_of([int(number) for number in gathered(store, "local rank", rank, str(ranks.local_rank))])
        if ranks.rank == 0:
            store.set("port", str(start_beside(_SERVER, found[0], json.dumps(slots))))
        port = int(store.get("port").decode())
    interface = environment.gloo_interface(rank.environ) or interface_of(found[ranks.rank])
    return Expected(variables={**variables, **variables_of(slots[ranks.rank], found[0], port, interface)})


def _check_name(rank: Rank) -> None:
    """Raise UserError where Horovod would not find the other hosts: it looks for some at this one's name alone."""
    if rank.ranks.local_world_size < rank.ranks.world_size and own_name_leads_nowhere():
        name = socket.gethostname()
        raise UserError(
            f"--engine horovod: on {name} the name {name} leads to no address that other hosts reach, and Horovod's "
            "gloo goes by it, whatever HOROVOD_GLOO_IFACE says; put its address into /etc/hosts there"
        )


Slot = Mapping[str, str | int]  # a rank's place, by the names that Horovod has for its parts


def slots_of(local_ranks: Sequence[int]) -> list[Slot]:
    """Each rank's place among all, from the local ranks of all; a host's stand together and begin with 0."""
    hosts = [local_ranks[: rank + 1].count(0) for rank in range(len(local_ranks))]
    slots: list[Slot] = []
    for rank, (local_rank, host) in enumerate(zip(local_ranks, hosts, strict=True)):
        same_place = [other for other, number in enumerate(local_ranks) if number == local_rank]  # one a host
        slots.append(
            {
                "hostname": f"host-{host}",  # only a name that its ranks share
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
    """What `horovodrun` puts into a rank's environment, for a server of its ranks at an address."""
    return {
        **{f"HOROVOD_{name.upper()}": str(value) for name, value in slot.items()},
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        **({"HOROVOD_GLOO_IFACE": interface} if interface is not None else {}),
    }


CONTRACT = Contract(expected=_expected, package="horovod", installs="use make horovod")
