"""The iterators behind `DataLoader`, which have no public class."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch.utils.data import dataloader
from torch.utils.data._utils.fetch import _MapDatasetFetcher
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


def call_for_samples(made: Callable[[], None], sample: Callable[[Any, Any, Callable[[], Any]], Any]) -> None:
    """Patch how samples are got by their numbers, one by one: `sample(dataset, number, get)` returns each.

    `made` is called whenever the object that gets them is made: once for a pass, in the process that makes samples.
    """
    fetcher: Any = _MapDatasetFetcher
    make, fetch = fetcher.__init__, fetcher.fetch

    @wraps(make)
    def made_fetcher(self: Any, *args: Any, **kwargs: Any) -> None:
        made()
        make(self, *args, **kwargs)

    @wraps(fetch)
    def fetched(self: Any, numbers: Any) -> Any:
        if not self.auto_collation:
            return fetch(self, numbers)
        return self.collate_fn([sample(self.dataset, number, _getter(self.dataset, number)) for number in numbers])

    fetcher.__init__, fetcher.fetch = made_fetcher, fetched


def _getter(dataset: Any, number: Any) -> Callable[[], Any]:
    """How one sample is got; data sets that give several at a time may have no other way."""
    several = getattr(dataset, "__getitems__", None)
    if several:
        return lambda: several([number])[0]
    return lambda: dataset[number]


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
