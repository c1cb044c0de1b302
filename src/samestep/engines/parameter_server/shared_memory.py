"""Tensors in memory that a process shares with those that it forks: anonymous, so that nothing can be left of it."""

import mmap

import torch
from torch import Tensor


def shared_empty(elements: int, dtype: torch.dtype) -> Tensor:
    """A tensor of one dimension, on the CPU. It counts as no file of /dev/shm, whose size is often limited."""
    if not elements:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(mmap.mmap(-1, elements * dtype.itemsize), dtype=dtype, count=elements)


def shared_copy(tensor: Tensor) -> Tensor:
    """A tensor's values in such memory."""
    copy = shared_empty(tensor.numel(), tensor.dtype).view(tensor.shape)
    return copy.copy_(tensor.detach())
