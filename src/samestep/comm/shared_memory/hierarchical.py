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
    def counts(self) -> list[int]:
        """The number of ranks of each host."""
        return [len(self.ranks_on(host)) for host in range(self.count)]

    @cached_property
    def places(self) -> Tensor | None:
        """Each rank's index where the ranks of a host stand next to each other; None if they are numbered so."""
        in_turn = [rank for host in range(self.count) for rank in self.ranks_on(host)]
        return None if in_turn == sorted(in_turn) else torch.tensor(in_turn).argsort()


class HierarchicalKernel:
    """`Kernel` for ranks on several hosts.

    The leader of a host is its first rank. With h hosts, r ranks on this one:

        all-reduce    reduce to the host's leader -> all-reduce of the h leaders -> broadcast within the host
        all-gather    gather within the host -> leaders send each other their hosts' blocks -> broadcast of each block
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

    def all_gather(self, input_: Tensor, out: Tensor) -> None:
        """A host's ranks get each other host's block as soon as their leader has received it.

        Memory is copied as fast as a fast link sends, so blocks are received where they belong in the output, if the
        ranks of a host are numbered one after the other, and gloo's all-gather isn't used, which has a copy of its
        output of its own. Hosts may have unlike numbers of ranks.
        """
        hosts, message = self._hosts, _as_bytes(input_)
        result = _as_bytes(out).view(len(hosts.of_rank), len(message))
        # [ranks, bytes], the ranks of a host next to each other.
        rows = result if hosts.places is None else torch.empty_like(result)
        blocks = rows.split(hosts.counts)
        if self._local is not None:
            self._local.all_gather(message, blocks[self._host])
        else:
            blocks[self._host].copy_(message)  # [1, bytes]
        others = [host for host in range(hosts.count) if host != self._host]
        sent, received = self._exchanging(blocks, others)
        for host in others:
            if self._leaders is not None:
                with self._or_all_raise():
                    received[host].wait()
            if self._local is not None:
                self._local.broadcast(blocks[host], 0)
        for work in sent:
            with self._or_all_raise():
                work.wait()
        if hosts.places is not None:
            torch.index_select(rows, 0, hosts.places, out=result)

    def _exchanging(self, blocks: Sequence[Tensor], others: Sequence[int]) -> tuple[list[Any], dict[int, Any]]:
        """Begin to send this host's block to the other leaders, and to receive theirs; nothing on other ranks."""
        if self._leaders is None:
            return [], {}
        with self._or_all_raise():
            received = {host: self._leaders.recv([blocks[host]], host, 0) for host in others}
            return [self._leaders.send([blocks[self._host]], host, 0) for host in others], received

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
