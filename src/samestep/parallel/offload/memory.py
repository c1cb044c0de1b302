"""Memory for offloaded tensors: pinned buffers in host memory, and tensors in a memory-mapped file.

Pinned buffers let an accelerator copy while the CPU does other work; pages of a file that isn't used need no memory.
"""

import mmap
import os
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from samestep.errors import UserError
from samestep.parallel.valueless import has_values
from samestep.sizes import decimal_size
from samestep.torch_internals.tensors import storage_id


def address(tensor: Tensor) -> int:
    """The address of a tensor's storage; for a tensor without values, the identity of its storage."""
    storage = tensor.untyped_storage()
    return storage.data_ptr() if has_values(tensor) else storage_id(storage)


class HostMemory:
    """Allocator of tensors in host memory, pinned if the device is an accelerator; buffers are reused."""

    def __init__(self, device: torch.device) -> None:
        self.pinned = device.type != "cpu"
        self._free: dict[int, list[Tensor]] = {}  # free buffers by size in bytes
        self._buffers: list[Tensor] = []

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Allocate a tensor that is never reused."""
        return torch.empty(tuple(shape), dtype=dtype, device="cpu", pin_memory=self.pinned)

    def lend(self, like: Tensor, until_gone: object) -> Tensor:
        """Make a contiguous tensor like `like`, whose buffer is reused when `until_gone` is freed.

        `weakref.finalize` returns the buffer when autograd drops the graph's node. It may then be overwritten at
        once, so readers must copy it before (`_Away.back`).
        """
        size = _rounded(like.nbytes)
        free = self._free.setdefault(size, [])
        if free:
            buffer = free.pop()
        else:
            buffer = self.empty([size], torch.uint8)
            self._buffers.append(buffer)
        weakref.finalize(until_gone, free.append, buffer)
        return buffer[: like.nbytes].view(like.dtype).view(like.shape)

    def buffers(self) -> Iterator[Tensor]:
        """All buffers that `lend` has made, in use or free."""
        yield from self._buffers


def _rounded(size: int) -> int:
    """Round up to one of eight sizes between powers of two, so that batches of different lengths share buffers."""
    # An eighth of the next lower power of two.
    step = 1 << max(0, size.bit_length() - 4)
    return -(-size // step) * step


_CHUNK = 1 << 30  # bytes of the file in one mapping; an untouched part of the file takes no room on disk


class MappedFile:
    """Allocator of tensors in an unnamed temporary file, which the system removes when this process ends."""

    def __init__(self, folder: Path | None) -> None:
        try:
            self._file = tempfile.TemporaryFile(dir=folder, prefix="samestep-")  # noqa: SIM115 - lives with the job
        except OSError as error:
            raise UserError(f"offload to {folder or 'the temporary folder'}: {error.strerror}") from None
        weakref.finalize(self, self._file.close)
        self._folder = folder or Path(tempfile.gettempdir())
        self._chunks: list[mmap.mmap] = []
        self._end = self._chunk_end = 0  # in the file
        self._given: set[int] = set()  # addresses

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Allocate a tensor in the file. Raises UserError if the disk is full."""
        count = torch.Size(shape).numel()
        size = -(-count * dtype.itemsize // mmap.PAGESIZE) * mmap.PAGESIZE
        if count == 0:
            return torch.empty(tuple(shape), dtype=dtype)
        if self._end + size > self._chunk_end:
            self._map(max(size, _CHUNK))
        try:
            # Without allocation, a write to the mapping on a full disk would raise SIGBUS.
            os.posix_fallocate(self._file.fileno(), self._end, size)
        except OSError as error:
            raise UserError(
                f"offload to {self._folder}: {error.strerror} after {decimal_size(self._end)}; "
                "set run.offload_folder to a folder with more room"
            ) from None
        # The offset in the last mapping.
        offset = self._end - (self._chunk_end - len(self._chunks[-1]))
        self._end += size
        tensor = torch.frombuffer(self._chunks[-1], dtype=dtype, count=count, offset=offset).view(tuple(shape))
        self._given.add(tensor.data_ptr())
        return tensor

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor's memory is in the file."""
        return tensor.data_ptr() in self._given

    def let_go(self) -> None:
        """Release all pages from memory; the system writes them to the file."""
        for chunk in self._chunks:
            chunk.madvise(mmap.MADV_DONTNEED)

    def _map(self, size: int) -> None:
        """Append a mapping of `size` bytes to the file; the rest of the mapping before stays unused."""
        self._end = self._chunk_end
        self._chunk_end += size
        os.ftruncate(self._file.fileno(), self._chunk_end)
        self._chunks.append(mmap.mmap(self._file.fileno(), size, offset=self._end))


def check_offload_folder(folder: Path | None) -> None:
    """Raise UserError if a folder is missing or not writable."""
    if folder is None:
        return
    if not folder.is_dir():
        what = "this is a file" if folder.exists() else "there is no such folder"
        raise UserError(f"run.offload_folder is {folder}: {what}; use a folder that is there")
    if not os.access(folder, os.W_OK):
        raise UserError(f"run.offload_folder is {folder}: it can't be written to; use one that can")
