"""The hierarchical kernel: shared memory within each host, and one stream of messages a host between them.

A ring over all n ranks sends 2(n-1)/n of a message through every link between hosts. With one rank a host it is
2(h-1)/h for h hosts: two thirds of it for two ranks on each of two hosts. (Thakur et al. 2005, section 4.)
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from samestep.comm.shared_memory.kernel import AVERAGE, OPERATIONS, Kernel

_BY_NUMBER = {number: operation for operation, number in OPERATIONS.items()}


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """Which rank of a group is on which host. Hosts are numbered in the order of their first ranks."""

    of_rank: Sequence[int]

    def ranks_on(self, host: int) -> list[int]:
        """The ranks of a host, the first of which is its leader."""
        return [rank for rank, its in enumerate(self.of_rank) if its == host]

    @property
    def count(self) -> int:
        return len(set(self.of_rank))


class HierarchicalKernel:
    """`Kernel` for ranks on several hosts."""

    def __init__(self, hosts: Hosts, rank: int, local: Kernel | None, leaders: dist.ProcessGroupGloo | None) -> None:
        """`local`: of the ranks on this host, None for one rank alone; `leaders`: None on a rank that leads none."""
        self._hosts = hosts
        self._host = hosts.of_rank[rank]
        self._local = local
        self._leaders: Any = leaders

    def barrier(self) -> None:
        if self._local is not None:
            self._local.barrier()
        if self._leaders is not None:
            self._leaders.barrier(dist.BarrierOptions()).wait()
        if self._local is not None:
            self._local.barrier()

    def all_reduce(self, tensor: Tensor, operation: int) -> None:
        within = OPERATIONS[ReduceOp.SUM] if operation == AVERAGE else operation
        if self._local is not None:
            self._local.all_reduce(tensor, within)
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
        host = self._hosts.of_rank[root]
        if host == self._host and self._local is not None:
            self._local.broadcast(tensor, self._hosts.ranks_on(host).index(root))
        if self._leaders is not None:
            options = dist.BroadcastOptions()
            options.rootRank = host
            with self._or_all_raise():  # as bytes: gloo broadcasts no int16, and no float of 8 bits
                self._leaders.broadcast([tensor.view(-1).view(torch.uint8)], options).wait()
        if host != self._host and self._local is not None:
            self._local.broadcast(tensor, 0)

    @contextmanager
    def _or_all_raise(self) -> Iterator[None]:
        """Where a message between hosts fails, let the ranks of this host raise, which wait for their leader."""
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


def _divide(tensor: Tensor, n: int) -> None:
    if tensor.is_floating_point():
        tensor.div_(n)
    else:
        tensor.div_(n, rounding_mode="floor")
