"""The iterators behind `DataLoader`, which have no public class."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch.utils.data import dataloader
from torch.utils.data._utils.worker import _worker_loop

BATCH_ITERATOR: Any = dataloader._BaseDataLoaderIter  # base class of those with and without worker processes
WORKER = _worker_loop  # what a worker process runs


def has_numbered_samples(loader: Any) -> bool:
    """Whether a loader asks its data set for samples by number, rather than for the next one."""
    return loader._dataset_kind == dataloader._DatasetKind.Map


def numbers_of(iterator: Any) -> Any:
    """The iterator over the numbers of the samples of each batch."""
    return iterator._sampler_iter


def replace_numbers(iterator: Any, numbers: Any) -> None:
    """Give an iterator other numbers of samples."""
    iterator._sampler_iter = numbers


def call_at_begin(begun: Callable[[Any, Any], None]) -> None:
    """Patch PyTorch's iterator over batches: `begun(iterator, loader)` is called whenever one is made or reset."""
    make, reset = BATCH_ITERATOR.__init__, BATCH_ITERATOR._reset

    @wraps(make)
    def made(iterator: Any, loader: Any) -> None:
        make(iterator, loader)
        begun(iterator, loader)

    @wraps(reset)
    def begun_anew(iterator: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
        reset(iterator, loader, *args, **kwargs)
        begun(iterator, loader)

    BATCH_ITERATOR.__init__, BATCH_ITERATOR._reset = made, begun_anew
