"""A mapped file: tensors whose memory is a file, so that what isn't used right now needs no memory."""

import mmap
import os
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from samestep.errors import UserError

_CHUNK = 1 << 30  # bytes of the file in one mapping; an untouched part of the file takes no room on disk


class MappedFile:
    """Tensors in a file without a name in a folder: it is gone with this process, however that ends."""

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
        """A tensor in the file. Raises UserError where the disk is full."""
        count = torch.Size(shape).numel()
        size = -(-count * dtype.itemsize // mmap.PAGESIZE) * mmap.PAGESIZE
        if count == 0:
            return torch.empty(tuple(shape), dtype=dtype)
        if self._end + size > self._chunk_end:
            self._map(max(size, _CHUNK))
        try:
            # A write into a mapping of a full disk would end the process without a word.
            os.posix_fallocate(self._file.fileno(), self._end, size)
        except OSError as error:
            raise UserError(
                f"offload to {self._folder}: {error.strerror} after {self._end / 1e9:.1f} GB; "
                "set run.offload_folder to a folder with more room"
            ) from None
        offset = self._end - (self._chunk_end - len(self._chunks[-1]))
        self._end += size
        tensor = torch.frombuffer(self._chunks[-1], dtype=dtype, count=count, offset=offset).view(tuple(shape))
        self._given.add(tensor.data_ptr())
        return tensor

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor's memory is in the file."""
        return tensor.data_ptr() in self._given

    @property
    def bytes_on_disk(self) -> int:
        """What the file takes of its disk, as the file system counts it."""
        return os.fstat(self._file.fileno()).st_blocks * 512

    def let_go(self) -> None:
        """Give the memory of all pages back to the system, which writes them to the file when it wants to."""
        for chunk in self._chunks:
            chunk.madvise(mmap.MADV_DONTNEED)

    def _map(self, size: int) -> None:
        self._end = self._chunk_end
        self._chunk_end += size
        os.ftruncate(self._file.fileno(), self._chunk_end)
        self._chunks.append(mmap.mmap(self._file.fileno(), size, offset=self._end))


def check_offload_folder(folder: Path | None) -> None:
    """Raise UserError where a folder can't take files."""
    if folder is None:
        return
    if not folder.is_dir():
        what = "this is a file" if folder.exists() else "there is no such folder"
        raise UserError(f"run.offload_folder is {folder}: {what}; a folder that is there would do")
    if not os.access(folder, os.W_OK):
        raise UserError(f"run.offload_folder is {folder}: it can't be written to; one that can would do")
