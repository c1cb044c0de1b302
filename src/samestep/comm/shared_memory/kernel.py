"""Kernel: the interface of the code that runs collectives in a region, and its arguments."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import DistBackendError, ReduceOp

# The numbers by which kernel.cpp knows them.
TYPES = {
    torch.float32: 0,
    torch.float64: 1,
    torch.float16: 2,
    torch.bfloat16: 3,
    torch.int32: 4,
    torch.int64: 5,
    torch.uint8: 6,
    torch.int8: 7,
}
OPERATIONS: Mapping[Any, int] = {
    ReduceOp.SUM: 0,
    ReduceOp.AVG: 1,
    ReduceOp.MIN: 2,
    ReduceOp.MAX: 3,
    ReduceOp.PRODUCT: 4,
}
AVERAGE = OPERATIONS[ReduceOp.AVG]
MOST_RANKS = 64


@dataclass(frozen=True, kw_only=True)
class GroupPlace:
    """This rank's place in a group that shares a region."""

    rank: int
    ranks: int
    limit: float  # timeout in seconds of a wait for another rank
    cores: int  # that the ranks of this host may use


class Kernel(Protocol):
    """Collectives on contiguous CPU tensors. They raise DistBackendError if a rank does not take part in time."""

    def barrier(self) -> None: ...

    def all_reduce(self, tensor: Tensor, operation: int) -> None:
        """`tensor` becomes the sum (or another of OPERATIONS) over ranks, in the order of the ranks."""
        ...

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """`tensor` becomes that of rank `root` of this group; of any dtype."""
        ...

    def all_gather(self, input_: Tensor, out: Tensor) -> None:
        """`out`: what every rank gave, in the order of the ranks; of any dtype."""
        ...

    def abort(self) -> None:
        """Make every waiting rank raise."""
        ...

    def close(self) -> None:
        """Unmap the region."""
        ...


class HostKernel(Kernel, Protocol):
    """A kernel for the ranks of one host, with the further collectives that only such a kernel has."""

    def reduce_scatter(self, input_: Tensor, out: Tensor, operation: int) -> None:
        """`input_`: as many numbers as `out` for each rank, in the order of the ranks; `out`: this rank's sum."""
        ...

    def reduce(self, tensor: Tensor, root: int, operation: int) -> None:
        """`tensor` of rank `root` becomes the sum over ranks, in the order of the ranks; the others' stay."""
        ...


def lost(rank: int) -> DistBackendError:
    """The error of a rank whose peer's process has ended; worded as gloo's, since callers match gloo's text."""
    return DistBackendError(f"shared memory: Connection closed by peer: rank {rank} of the group has ended")


def timed_out(rank: int, limit: float) -> DistBackendError:
    return DistBackendError(
        f"shared memory: Timed out waiting {limit * 1000:.0f}ms for rank {rank} of the group, which has not called "
        "the same collective"
    )


def broken() -> DistBackendError:
    return DistBackendError("shared memory: Connection closed by peer: another rank of the group has given up")


def mismatch(rank: int) -> DistBackendError:
    return DistBackendError(
        f"shared memory: rank {rank} of the group calls another collective, or one of another size or dtype, than "
        "this rank; all ranks of a group must call the same ones in the same order"
    )
