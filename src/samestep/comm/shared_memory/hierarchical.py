"""The hierarchical kernel: shared memory within each host, and one stream of messages a host between them.

A ring over all n ranks sends 2(n-1)/n of a message through every link between hosts. With one rank a host it is
2(h-1)/h for h hosts: two thirds of it for two ranks on each of two hosts. (Thakur et al. 2005, section 4.)
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp
from torch.distributed.distributed_c10d import AllgatherOptions

from samestep.comm.shared_memory.kernel import AVERAGE, OPERATIONS, HostKernel

_BY_NUMBER = {number: operation for operation, number in OPERATIONS.items()}


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """The host of each rank of a group. Hosts are numbered in the order of their first ranks."""

    of_rank: Sequence[int]

    def ranks_on(self, host: int) -> list[int]:
        """The ranks of a host, the first of which is its leader."""
        return [rank for rank, its in enumerate(self.of_rank) if its == host]

    @property
    def count(self) -> int:
        return len(set(self.of_rank))

    @property
    def most(self) -> int:
        """The largest number of ranks on a host."""
        return max(map(self.of_rank.count, self.of_rank))

    @cached_property
    def place_of_rank(self) -> Tensor:
        """Each rank's index in a flattened [hosts, most] table of the hosts' ranks."""
        places = [host * self.most + self.ranks_on(host).index(rank) for rank, host in enumerate(self.of_rank)]
        return torch.tensor(places)


class HierarchicalKernel:
    """`Kernel` for ranks on several hosts.

    The leader of a host is its first rank. With h hosts, r ranks on this one:

        all-reduce    reduce to the host's leader -> all-reduce of the h leaders -> broadcast within the host
        all-gather    gather within the host -> all-gather of the leaders' blocks -> broadcast -> put into rank order
        broadcast     from the root to its host and so to its leader -> between leaders -> within the other hosts
        barrier       host, leaders, host again: nobody leaves before everyone has come

    Only leaders send between hosts; the others wait in the second collective of their host meanwhile. If a leader's
    message fails, they are told by `abort`.
    """

    def __init__(
        self, hosts: Hosts, rank: int, local: HostKernel | None, leaders: dist.ProcessGroupGloo | None
    ) -> None:
        """`local`: of the ranks on this host, None for one rank alone; `leaders`: None on a rank that leads none."""
        self._hosts = hosts
        self._host = hosts.of_rank[rank]
        self._local = local
        self._leaders: Any = leaders

    def barrier(self) -> None:
        """Three waits, the middle one of the leaders alone."""
        if self._local is not None:
            self._local.barrier()
        if self._leaders is not None:
            self._leaders.barrier(dist.BarrierOptions()).wait()
        if self._local is not None:
            self._local.barrier()

    def all_reduce(self, tensor: Tensor, operation: int) -> None:
        """Sums are divided once, by the leader: an average of averages would be wrong."""
        within = OPERATIONS[ReduceOp.SUM] if operation == AVERAGE else operation
        if self._local is not None:
            self._local.reduce(tensor, 0, within)
        if self._leaders is not None:
            options: Any = dist.AllreduceOptions()
            options.reduceOp = _BY_NUMBER[within]
            with self._or_all_raise():
                self._leaders.allreduce([tensor], options).wait()
            if operation == AVERAGE:
                _divide(tensor, len(self._hosts.of_rank))
        if self._local is not None:
            self._local.broadcast(tensor, 0)

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Within the root's host first, then between the leaders, then within the other hosts."""
        host = self._hosts.of_rank[root]
        if host == self._host and self._local is not None:
            self._local.broadcast(tensor, self._hosts.ranks_on(host).index(root))
        if self._leaders is not None:
            options = dist.BroadcastOptions()
            options.rootRank = host
            with self._or_all_raise():
                self._leaders.broadcast([_as_bytes(tensor)], options).wait()
        if host != self._host and self._local is not None:
            self._local.broadcast(tensor, 0)

    def all_gather(self, given: Tensor, out: Tensor) -> None:
        """Hosts may have unlike numbers of ranks; blocks are as large as the fullest host's."""
        message, place = _as_bytes(given), self._hosts.place_of_rank
        # [hosts, ranks, bytes]: as many ranks of each host as the fullest one has, since gloo gathers equal parts
        blocks = torch.empty(self._hosts.count, self._hosts.most, len(message), dtype=torch.uint8)
        block = blocks[self._host]
        if self._local is not None:
            self._local.all_gather(message, block[: len(self._hosts.ranks_on(self._host))])
        else:
            block[0] = message
        if self._leaders is not None:
            with self._or_all_raise():
                self._leaders.allgather([list(blocks)], [block.clone()], AllgatherOptions()).wait()
        if self._local is not None:
            self._local.broadcast(blocks, 0)
        torch.index_select(blocks.flatten(0, 1), 0, place, out=_as_bytes(out).view(len(place), len(message)))

    @contextmanager
    def _or_all_raise(self) -> Iterator[None]:
        """Abort the local kernel if a message between hosts fails, so that ranks waiting for their leader raise."""
        try:
            yield
        except Exception:
            self.abort()
            raise

    def abort(self) -> None:
        if self._local is not None:
            self._local.abort()

    def close(self) -> None:
        if self._local is not None:
            self._local.close()


def _as_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor's bytes, in a row; gloo sends no int16, and no float of 8 bits."""
    return tensor.view(-1).view(torch.uint8)


def _divide(tensor: Tensor, n: int) -> None:
    if tensor.is_floating_point():
        tensor.div_(n)
    else:
        tensor.div_(n, rounding_mode="floor")
