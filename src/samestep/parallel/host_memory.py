"""Host memory: buffers in the CPU's memory that an accelerator can copy to and from while the CPU does other work."""

import weakref
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor


class HostMemory:
    """Tensors in the host's memory, pinned where the device is an accelerator; used again once they are free."""

    def __init__(self, device: torch.device) -> None:
        self.pinned = device.type != "cpu"
        self._free: dict[int, list[Tensor]] = {}  # by their bytes
        self._buffers: list[Tensor] = []

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor to keep."""
        return torch.empty(tuple(shape), dtype=dtype, device="cpu", pin_memory=self.pinned)

    def lend(self, like: Tensor, until_gone: object) -> Tensor:
        """A contiguous tensor of that shape and dtype, whose memory is used again when `until_gone` is gone."""
        size = _rounded(like.nbytes)
        free = self._free.setdefault(size, [])
        if free:
            buffer = free.pop()
        else:
            buffer = self.empty([size], torch.uint8)
            self._buffers.append(buffer)
        weakref.finalize(until_gone, free.append, buffer)
        return buffer[: like.nbytes].view(like.dtype).view(like.shape)

    def lent(self) -> Iterator[Tensor]:
        """All memory that was lent at one time or another, and is kept for the next."""
        yield from self._buffers


def _rounded(size: int) -> int:
    """A size of which there are eight between a power of two and the next, so that batches of many lengths share."""
    step = 1 << max(0, size.bit_length() - 4)
    return -(-size // step) * step
