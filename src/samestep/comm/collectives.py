"""The collectives: what each does, how it is run on a group, what must come out, and how its bandwidth is counted.

Every collective works on a message of n chunks for a group of n ranks, chunk r being the one that belongs to rank r.
A rank gives none, one or all of the chunks, and takes none, one or all: that is all that `COLLECTIVES` has to say of
buffers. Bytes and bandwidths follow nccl-tests (github.com/NVIDIA/nccl-tests): the size S of a message is that of all
n chunks (`src/all_gather.cu` and its like), algorithm bandwidth is S / t, and bus bandwidth is that times a factor
by which it may be held against what one link carries, whatever n is (`doc/PERFORMANCE.md`).

`expected` computes in Python integers, so that what a transport gives can be compared exactly: values are small
enough that their sum over the ranks is exact in every dtype that is tried.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.comm.messages import ALL_GATHER, REDUCE_SCATTER

Chunks = Literal["none", "one", "all"]
Who = Literal["every rank", "rank 0"]
Values = Sequence[Sequence[int]]  # [ranks][elements]: what each rank gives


@dataclass(frozen=True, kw_only=True)
class Buffers:
    """Input and output tensor of one rank, [elements]; the same tensor for a collective that works in place."""

    given: Tensor
    taken: Tensor


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective operation on a group of n ranks; the root of those that have one is rank 0 of the group."""

    summary: str  # what it does, as a sentence
    run: Callable[[dist.ProcessGroup, Buffers], None]  # returns once the rank's buffers are its own again
    expected: Callable[[Values, int], Sequence[int] | None]  # what a rank holds afterwards; None: nothing is said
    bus_factor: Callable[[int], float]  # of n ranks
    gives: Chunks
    givers: Who = "every rank"
    takes: Chunks
    takers: Who = "every rank"
    in_place: bool = False
    reduces: bool = False

    def elements(self, chunk: int, n: int, rank: int) -> tuple[int, int]:
        """The numbers of elements of a rank's input and output, for chunks of `chunk` elements."""
        count = {"none": 0, "one": chunk, "all": chunk * n}
        gives = count[self.gives] if self.givers == "every rank" or rank == 0 else 0
        takes = count[self.takes] if self.takers == "every rank" or rank == 0 else 0
        both = max(gives, takes)
        return (both, both) if self.in_place else (gives, takes)

    def buffers(self, chunk: int, n: int, rank: int, *, dtype: torch.dtype, device: torch.device) -> Buffers:
        """Tensors of zeros for messages of n chunks, whose memory is there: nothing is mapped on first use."""
        gives, takes = self.elements(chunk, n, rank)
        input_ = torch.empty(gives, dtype=dtype, device=device).zero_()
        taken = input_ if self.in_place else torch.empty(takes, dtype=dtype, device=device).zero_()
        return Buffers(given=input_, taken=taken)


def algorithm_bandwidth(size: int, seconds: float) -> float:
    """Bytes a second: S / t, with S the bytes of all n chunks."""
    return size / seconds


def chunk_of(size: int, n: int, element_bytes: int) -> int:
    """Elements of a chunk, so that n of them have `size` bytes or, where that does not divide, a little less."""
    return size // (n * element_bytes)


def _send_recv(group: dist.ProcessGroup, buffers: Buffers) -> None:
    """Send to the next rank and receive from the one before; posted as a batch, as blocking sends would deadlock."""
    rank, n = group.rank(), group.size()
    operations = [
        dist.P2POp(dist.isend, buffers.given, group=group, group_peer=(rank + 1) % n),
        dist.P2POp(dist.irecv, buffers.taken, group=group, group_peer=(rank - 1) % n),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def _broadcast(group: dist.ProcessGroup, buffers: Buffers) -> None:
    dist.broadcast(buffers.given, group_src=0, group=group)


def _scatter(group: dist.ProcessGroup, buffers: Buffers) -> None:
    chunks = _chunks(buffers.given, group) if group.rank() == 0 else None
    dist.scatter(buffers.taken, chunks, group_src=0, group=group)


def _gather(group: dist.ProcessGroup, buffers: Buffers) -> None:
    chunks = _chunks(buffers.taken, group) if group.rank() == 0 else None
    dist.gather(buffers.given, chunks, group_dst=0, group=group)


def _reduce(group: dist.ProcessGroup, buffers: Buffers) -> None:
    """Reduce to the root. Other ranks' buffers may hold partial sums afterwards, so `expected` is None for them."""
    dist.reduce(buffers.given, group_dst=0, group=group)


def _all_reduce(group: dist.ProcessGroup, buffers: Buffers) -> None:
    dist.all_reduce(buffers.given, group=group)


def _all_gather(group: dist.ProcessGroup, buffers: Buffers) -> None:
    ALL_GATHER(buffers.taken, buffers.given, group=group)


def _reduce_scatter(group: dist.ProcessGroup, buffers: Buffers) -> None:
    REDUCE_SCATTER(buffers.taken, buffers.given, group=group)


def _all_to_all(group: dist.ProcessGroup, buffers: Buffers) -> None:
    dist.all_to_all_single(buffers.taken, buffers.given, group=group)


def _barrier(group: dist.ProcessGroup, buffers: Buffers) -> None:
    dist.barrier(group)


def _chunks(tensor: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    return list(tensor.chunk(group.size()))


def _part(values: Sequence[int], rank: int, n: int) -> Sequence[int]:
    """The chunk of a message that belongs to a rank: the `rank`-th of the n equal chunks that it consists of."""
    count = len(values) // n
    return values[rank * count : (rank + 1) * count]


def _sums(values: Values) -> list[int]:
    return [sum(column) for column in zip(*values, strict=True)]


def _joined(parts: Sequence[Sequence[int]]) -> list[int]:
    return [value for part in parts for value in part]


def _whole(n: int) -> float:
    return 1.0


def all_but_own(n: int, message: float = 1.0) -> float:
    """What a rank sends or receives of a message of this size, where it has its own part already."""
    return message * (n - 1) / n


COLLECTIVES: Mapping[str, Collective] = {
    "send/recv": Collective(
        summary="Every rank sends its tensor to the next rank and receives that of the rank before; the last rank "
        "sends to rank 0.",
        run=_send_recv,
        expected=lambda values, rank: values[(rank - 1) % len(values)],
        bus_factor=_whole,
        gives="all",
        takes="all",
    ),
    "broadcast": Collective(
        summary="Rank 0's tensor goes to every rank.",
        run=_broadcast,
        expected=lambda values, rank: values[0],
        bus_factor=_whole,
        gives="all",
        takes="all",
        in_place=True,
    ),
    "scatter": Collective(
        summary="Rank 0 has a chunk for every rank, and each rank gets its own.",
        run=_scatter,
        expected=lambda values, rank: _part(values[0], rank, len(values)),
        bus_factor=all_but_own,
        gives="all",
        givers="rank 0",
        takes="one",
    ),
    "gather": Collective(
        summary="Every rank has a chunk, and rank 0 gets all of them, in the order of the ranks.",
        run=_gather,
        expected=lambda values, rank: _joined(values) if rank == 0 else None,
        bus_factor=all_but_own,
        gives="one",
        takes="all",
        takers="rank 0",
    ),
    "reduce": Collective(
        summary="The tensors of all ranks are added up, and rank 0 gets the sum; what the others hold afterwards is "
        "not defined.",
        run=_reduce,
        expected=lambda values, rank: _sums(values) if rank == 0 else None,
        bus_factor=_whole,
        gives="all",
        takes="all",
        in_place=True,
        reduces=True,
    ),
    "all-reduce": Collective(
        summary="The tensors of all ranks are added up, and every rank gets the sum.",
        run=_all_reduce,
        expected=lambda values, rank: _sums(values),
        bus_factor=lambda n: 2 * (n - 1) / n,
        gives="all",
        takes="all",
        in_place=True,
        reduces=True,
    ),
    "all-gather": Collective(
        summary="Every rank has a chunk, and every rank gets all of them, in the order of the ranks.",
        run=_all_gather,
        expected=lambda values, rank: _joined(values),
        bus_factor=all_but_own,
        gives="one",
        takes="all",
    ),
    "reduce-scatter": Collective(
        summary="The tensors of all ranks are added up, and each rank gets its chunk of the sum.",
        run=_reduce_scatter,
        expected=lambda values, rank: _part(_sums(values), rank, len(values)),
        bus_factor=all_but_own,
        gives="all",
        takes="one",
        reduces=True,
    ),
    "all-to-all": Collective(
        summary="Every rank has a chunk for every rank: rank r gets chunk r of each, in the order of the ranks.",
        run=_all_to_all,
        expected=lambda values, rank: _joined([_part(value, rank, len(values)) for value in values]),
        bus_factor=all_but_own,
        gives="all",
        takes="all",
    ),
    "barrier": Collective(
        summary="Nothing is sent: each rank waits until every rank has come.",
        run=_barrier,
        expected=lambda values, rank: [],
        bus_factor=_whole,
        gives="none",
        takes="none",
    ),
}
