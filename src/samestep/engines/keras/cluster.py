"""The ranks as TensorFlow's cluster: each one's part in it, and an address that all of them know."""

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from samestep import environment
from samestep.cluster.network.agreed import agreed_in_group
from samestep.cluster.network.held_port import held_port


@dataclass(frozen=True, kw_only=True)
class Task:
    """A rank's part in a cluster of TensorFlow's."""

    cluster: Mapping[str, Sequence[str]]  # addresses of each kind of task
    kind: str
    index: int

    def to_json(self) -> dict[str, Any]:
        """What TF_CONFIG holds."""
        return {"cluster": dict(self.cluster), "task": {"type": self.kind, "index": self.index}}


def agree(kinds: Sequence[str]) -> Task:
    """Give each rank the kind of task that stands at its place, and an address; every rank must ask.

    Ranks of one host meet on its loopback. Each holds its port until all have theirs, so no two get the same.
    """
    address = agreed_in_group(environment.main_address())
    with held_port() as held:
        mine = (socket.gethostname(), address, held.getsockname()[1])
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, mine)
        dist.barrier()
    local = len({host for host, _, _ in ranks}) == 1
    cluster: dict[str, list[str]] = {}
    place = 0
    for rank, (kind, (_, address, port)) in enumerate(zip(kinds, ranks, strict=True)):
        tasks = cluster.setdefault(kind, [])
        if rank == dist.get_rank():
            place = len(tasks)
        tasks.append(f"{'127.0.0.1' if local else address}:{port}")
    return Task(cluster=cluster, kind=kinds[dist.get_rank()], index=place)
