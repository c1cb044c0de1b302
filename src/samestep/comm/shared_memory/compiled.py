"""The compiled kernel: kernel.cpp, called through ctypes, which releases the GIL during the call."""

import ctypes
from pathlib import Path
from typing import Any

from torch import Tensor

from samestep.comm.shared_memory import kernel
from samestep.comm.shared_memory.kernel import TYPES, GroupPlace
from samestep.comm.shared_memory.region import SharedRegion

# Bytes of a message that ranks work on at a time: they stay in the second-level cache, and while one chunk is summed
# the next one is on its way.
SLOT = 1 << 17
# Up to this every rank sums the whole message, which costs one wait instead of two.
# In bytes.
_DIRECTLY_BELOW = 1 << 15

_SIZE = ctypes.c_size_t
_POINTER = ctypes.c_void_p
_INT = ctypes.c_int
_DONE, _TIMED_OUT, _PEER_LOST, _MISMATCH, _BROKEN = range(5)


def load(path: Path) -> Any:
    """The functions of the compiled library."""
    functions = ctypes.CDLL(str(path))
    functions.samestep_region_bytes.restype = _SIZE
    functions.samestep_region_bytes.argtypes = [_INT, _SIZE]
    functions.samestep_open.restype = _POINTER
    functions.samestep_open.argtypes = [_POINTER, _INT, _INT, _INT, _SIZE, ctypes.c_int64, _INT, _INT]
    functions.samestep_close.restype = None
    functions.samestep_break.restype = None
    for name, arguments in {
        "close": [],
        "break": [],
        "lost": [],
        "barrier": [],
        "all_reduce": [_POINTER, _SIZE, _INT, _INT, _SIZE],
        "reduce_scatter": [_POINTER, _POINTER, _SIZE, _INT, _INT],
        "reduce": [_POINTER, _SIZE, _INT, _INT, _INT],
        "all_gather": [_POINTER, _POINTER, _SIZE],
        "broadcast": [_POINTER, _SIZE, _INT],
    }.items():
        getattr(functions, f"samestep_{name}").argtypes = [_POINTER, *arguments]
    return functions


def region_bytes(functions: Any, ranks: int) -> int:
    """How large a group's region is."""
    return functions.samestep_region_bytes(ranks, SLOT)


class CompiledKernel:
    """`Kernel` by kernel.cpp."""

    def __init__(self, functions: Any, region: SharedRegion, place: GroupPlace) -> None:
        self._functions = functions
        self._region = region
        self._place = place
        # Where ranks share cores, who waits must give its core to who is waited for.
        roomy = place.ranks <= place.cores
        spins = 4000 if roomy else 50
        self._view = (ctypes.c_char * len(region.memory)).from_buffer(region.memory)
        self._handle = functions.samestep_open(
            ctypes.addressof(self._view),
            region.file,
            place.rank,
            place.ranks,
            SLOT,
            int(place.limit * 1e9),
            spins,
            roomy,
        )

    def barrier(self) -> None:
        self._check(self._functions.samestep_barrier(self._handle))

    def all_reduce(self, tensor: Tensor, operation: int) -> None:
        self._check(
            self._functions.samestep_all_reduce(
                self._handle, tensor.data_ptr(), tensor.numel(), TYPES[tensor.dtype], operation, _DIRECTLY_BELOW
            )
        )

    def reduce_scatter(self, input_: Tensor, out: Tensor, operation: int) -> None:
        self._check(
            self._functions.samestep_reduce_scatter(
                self._handle, input_.data_ptr(), out.data_ptr(), out.numel(), TYPES[out.dtype], operation
            )
        )

    def reduce(self, tensor: Tensor, root: int, operation: int) -> None:
        self._check(
            self._functions.samestep_reduce(
                self._handle, tensor.data_ptr(), tensor.numel(), TYPES[tensor.dtype], operation, root
            )
        )

    def all_gather(self, input_: Tensor, out: Tensor) -> None:
        self._check(
            self._functions.samestep_all_gather(self._handle, input_.data_ptr(), out.data_ptr(), input_.nbytes)
        )

    def broadcast(self, tensor: Tensor, root: int) -> None:
        self._check(self._functions.samestep_broadcast(self._handle, tensor.data_ptr(), tensor.nbytes, root))

    def abort(self) -> None:
        """Set the region's flag by which waiting ranks raise; may be called from any thread."""
        self._functions.samestep_break(self._handle)

    def close(self) -> None:
        self._functions.samestep_close(self._handle)
        del self._view  # the memory can't be unmapped while a view is there
        self._region.close()

    def _check(self, result: int) -> None:
        """Raise for a result of the C functions that isn't success."""
        if result == _DONE:
            return
        rank = self._functions.samestep_lost(self._handle)
        if result == _TIMED_OUT:
            raise kernel.timed_out(rank, self._place.limit)
        if result == _PEER_LOST:
            raise kernel.lost(rank)
        raise kernel.mismatch(rank) if result == _MISMATCH else kernel.broken()
