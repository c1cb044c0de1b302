"""The interpreted kernel: the same collectives by PyTorch's operators on views of the region, without a compiler.

Its counters are plain stores and loads. Others see those in order on x86 processors alone; elsewhere `is_sound` is
False.
"""

import fcntl
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from samestep.comm.shared_memory import kernel
from samestep.comm.shared_memory.kernel import AVERAGE, TYPES, GroupPlace
from samestep.comm.shared_memory.region import SharedRegion

SLOT = 1 << 20  # bytes
_LINE = 16  # int64 numbers between two ranks' counters, so that they share no cache line
_LOOKS = 200  # polls of a counter before the processor is yielded
_PATIENCE = 0.02  # seconds of waiting before the peer's process is checked
_STEPS: Sequence[Callable[[Tensor, Tensor], Tensor]] = (
    Tensor.add_,
    Tensor.add_,  # the average: a sum, divided at the end
    lambda a, b: torch.minimum(a, b, out=a),
    lambda a, b: torch.maximum(a, b, out=a),
    Tensor.mul_,
)


def is_sound() -> bool:
    """Whether this machine's processor shows one process's stores to another in their order."""
    return platform.machine().lower() in ("x86_64", "amd64")


def region_bytes(ranks: int) -> int:
    """How large a group's region is: a line of counters and two slots a rank."""
    return ranks * (_LINE * 8 + 2 * SLOT)


class InterpretedKernel:
    """`Kernel` in Python. Chunks and phases are those of kernel.cpp, where they are explained."""

    def __init__(self, region: SharedRegion, place: GroupPlace) -> None:
        self._region = region
        self._place = place
        whole = torch.frombuffer(region.memory, dtype=torch.uint8)
        n = place.ranks
        # [ranks, line]: 0: a rank's phase; 1, 2: its collective's signature, by parity; 3: that it has given up
        self._seats = whole[: n * _LINE * 8].view(torch.int64).view(n, _LINE).numpy()
        self._slots = whole[n * _LINE * 8 :].view(n, 2, SLOT)  # [ranks, parity, bytes]
        self._phase = 0
        self._chunk = 0

    def barrier(self) -> None:
        self._begin(1)

    def all_reduce(self, tensor: Tensor, operation: int) -> None:
        """Every rank sums the whole chunk: n reads of it, one wait."""
        flat = tensor.view(-1)
        signature = hash((2, flat.nbytes, TYPES[flat.dtype], operation))
        for first, last, slots in self._chunks(flat, SLOT):
            slots[self._place.rank].copy_(flat[first:last])
            self._meet(first, signature)
            flat[first:last] = self._reduced(slots, operation)

    def reduce_scatter(self, input_: Tensor, out: Tensor, operation: int) -> None:
        """A slot holds a piece for each rank; this rank reads its piece of every slot."""
        n, rank = self._place.ranks, self._place.rank
        parts, flat = input_.view(n, -1), out.view(-1)
        signature = hash((3, flat.nbytes, TYPES[flat.dtype], operation))
        room = SLOT // n // 64 * 64
        for first, last, slots in self._chunks(flat, room, parts=n):
            slots[rank].view(n, -1).copy_(parts[:, first:last])
            self._meet(first, signature)
            flat[first:last] = self._reduced(slots.view(n, n, -1)[:, rank], operation)

    def reduce(self, tensor: Tensor, root: int, operation: int) -> None:
        """All write, the root reads; the others' tensors stay as they are."""
        flat = tensor.view(-1)
        signature = hash((6, flat.nbytes, TYPES[flat.dtype], operation, root))
        for first, last, slots in self._chunks(flat, SLOT):
            slots[self._place.rank].copy_(flat[first:last])
            self._meet(first, signature)
            if self._place.rank == root:
                flat[first:last] = self._reduced(slots, operation)

    def all_gather(self, input_: Tensor, out: Tensor) -> None:
        """Each rank writes its part into its slot and reads all slots."""
        flat, parts = _as_bytes(input_), _as_bytes(out).view(self._place.ranks, -1)
        signature = hash((4, flat.nbytes))
        for first, last, slots in self._chunks(flat, SLOT):
            slots[self._place.rank].copy_(flat[first:last])
            self._meet(first, signature)
            parts[:, first:last] = slots

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """The root writes; the others only wait, which keeps phases and slots in step."""
        flat = _as_bytes(tensor)
        signature = hash((5, flat.nbytes, root))
        for first, last, slots in self._chunks(flat, SLOT):
            if self._place.rank == root:
                slots[root].copy_(flat[first:last])
            self._meet(first, signature)
            if self._place.rank != root:
                flat[first:last] = slots[root]

    def abort(self) -> None:
        self._seats[self._place.rank, 3] = 1

    def close(self) -> None:
        del self._seats, self._slots  # the memory can't be unmapped while views are there
        self._region.close()

    def _chunks(self, flat: Tensor, room: int, parts: int = 1) -> Iterator[tuple[int, int, Tensor]]:
        """The chunks of a message: the first and last number, and every rank's slot as numbers. [ranks, numbers]"""
        step = room // flat.element_size()
        for first in range(0, flat.numel(), step):
            last = min(first + step, flat.numel())
            bytes_used = (last - first) * flat.element_size() * parts
            parity = self._chunk & 1
            self._chunk += 1
            yield first, last, self._slots[:, parity, :bytes_used].view(flat.dtype)

    def _reduced(self, slots: Tensor, operation: int) -> Tensor:
        """What the ranks gave, joined in their order; fp16 and bf16 in float32. [numbers]"""
        wide = torch.float32 if slots.dtype in (torch.float16, torch.bfloat16) else slots.dtype
        joined = slots[0].to(wide, copy=True)
        for other in slots[1:]:
            _STEPS[operation](joined, other.to(wide))
        if operation == AVERAGE:
            joined = joined.div_(len(slots)) if wide.is_floating_point else joined // len(slots)
        return joined.to(slots.dtype)

    def _meet(self, first: int, signature: int) -> None:
        if first == 0:
            self._begin(signature)
        else:
            self._wait_for_all()

    def _begin(self, signature: int) -> None:
        """The first wait of a collective, in which every rank must have called the same one."""
        place = 1 + ((self._phase + 1) & 1)
        self._seats[self._place.rank, place] = signature
        self._wait_for_all()
        for rank in range(self._place.ranks):
            if self._seats[rank, place] != signature:
                self.abort()
                raise kernel.mismatch(rank)

    def _wait_for_all(self) -> None:
        """Publish this rank's next phase, and wait until all ranks have reached it."""
        self._phase += 1
        self._seats[self._place.rank, 0] = self._phase
        for rank in range(self._place.ranks):
            self._wait_for(rank)

    def _wait_for(self, rank: int) -> None:
        """Wait until a rank's phase counter has reached this rank's.

        Polls first, then yields the processor, then sleeps a millisecond at a time and checks whether the rank is
        alive; a system call at each poll would slow the usual case. Raises DistBackendError if another rank has
        aborted, if the process of `rank` has ended, or after the group's timeout.
        """
        phases, phase, looks = self._seats[:, 0], self._phase, 0
        began = time.monotonic()
        # A stale value only delays: counters never fall.
        while phases[rank] < phase:
            looks += 1
            if looks < _LOOKS:
                continue
            os.sched_yield()
            if (waited := time.monotonic() - began) < _PATIENCE:
                continue
            time.sleep(1e-3)
            if self._seats[:, 3].any():
                raise kernel.broken()
            if self._is_gone(rank) and phases[rank] < phase:
                self.abort()
                raise kernel.lost(rank)
            if waited > self._place.limit:
                self.abort()
                raise kernel.timed_out(rank, self._place.limit)

    def _is_gone(self, rank: int) -> bool:
        """Whether a rank's process has ended: the kernel has then taken back the lock on its byte of the file."""
        try:
            fcntl.lockf(self._region.file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        except OSError:
            return False
        fcntl.lockf(self._region.file, fcntl.LOCK_UN, 1, rank)
        return True


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8) if tensor.dtype is not torch.bool else tensor.view(torch.uint8).view(-1)
