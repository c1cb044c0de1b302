"""Reads a DataLoader that a custom loop hands over: what samestep takes of it, and what it doesn't use.

samestep deals out the samples itself, by their numbers, so that every layout trains on the same batches. Of a
DataLoader it takes the data set, the batch size, the collate function, whether it shuffles, whether it drops the last
batch, and the number of workers. A sampler that chooses samples in another way is refused.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    default_collate,
)

from samestep.data.loader import Collate
from samestep.data.types import Batch, Samples, as_batch
from samestep.errors import UserError


@dataclass(frozen=True, kw_only=True)
class LoaderParts:
    """What is taken of a DataLoader."""

    samples: Samples
    collate: Collate
    batch: int  # samples of a global batch
    shuffle: bool
    drop_last: bool
    workers: int
    unused: str | None  # what of it is not used, in words


def dealt_parts(
    samples: Any, what: str, *, batch: int | None, collate: Collate | None, shuffle: bool | None = None
) -> LoaderParts:
    """What a custom loop deals out, given as a DataLoader or one by one. Raises UserError where it is given twice."""
    if isinstance(samples, DataLoader):
        twice = {"batch": batch, "collate": collate, "shuffle": shuffle}
        if names := [name for name, value in twice.items() if value is not None]:
            raise UserError(
                f"{what}: {' and '.join(f'{name}=' for name in names)} and a DataLoader are given, which says it "
                f"too; leave {'it' if len(names) == 1 else 'them'} out, or give the DataLoader's data set"
            )
        return loader_parts(samples, what)
    if batch is None:
        raise UserError(f"{what}: batch= is missing; give the number of samples of a global batch, or a DataLoader")
    return LoaderParts(
        samples=samples,
        collate=_Collated(default_collate) if collate is None else collate,
        batch=batch,
        shuffle=shuffle is not False,
        drop_last=False,
        workers=0,
        unused=None,
    )


class _Collated:
    """A DataLoader's collate function; a mapping of its is all inputs. A class, so that workers can pickle it."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: Any) -> Batch:
        collated = self._collate(samples)
        return Batch(collated, None) if isinstance(collated, Mapping) else as_batch(collated)


def loader_parts(loader: DataLoader[Any], what: str) -> LoaderParts:
    """Read a DataLoader. Raises UserError for one whose batches can't be dealt out by the samples' numbers.

    `what`: who was given it, for messages.
    """
    batches = loader.batch_sampler
    if batches is None:
        raise UserError(f"{what}: the DataLoader has batch_size=None; use the number of samples of a global batch")
    if type(batches) is not BatchSampler:
        raise UserError(
            f"{what}: the DataLoader has a batch sampler of its own, a {type(batches).__name__}, and samestep deals "
            "out the samples itself; use batch_size=, and lengths= of session.batches to group samples by length"
        )
    samples, shuffle, ranks = _order(loader.dataset, batches.sampler, what)
    unused = [
        *(["its DistributedSampler, since a session deals out the samples"] if ranks is not None else []),
        *(["its generator, since the order is of the session's seed"] if loader.generator is not None else []),
        *(["its worker_init_fn"] if loader.worker_init_fn is not None else []),
    ]
    return LoaderParts(
        samples=samples,
        collate=_Collated(loader.collate_fn),
        batch=batches.batch_size * (ranks or 1),
        shuffle=shuffle,
        drop_last=batches.drop_last,
        workers=loader.num_workers,
        unused=f"{what}: of the DataLoader is not used: {'; '.join(unused)}" if unused else None,
    )


def _order(dataset: Any, sampler: Any, what: str) -> tuple[Samples, bool, int | None]:
    """The samples, whether they are shuffled, and for how many ranks a DistributedSampler deals them out."""
    if isinstance(sampler, DistributedSampler):
        return dataset, sampler.shuffle, sampler.num_replicas
    if type(sampler) is SubsetRandomSampler:
        return Subset(dataset, [int(index) for index in sampler.indices]), True, None
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(dataset):
        return dataset, True, None
    # Of an IterableDataset the check of the samples says why it can't be dealt out.
    if isinstance(sampler, SequentialSampler) or isinstance(dataset, IterableDataset):
        samples: Any = dataset
        return samples, False, None
    raise UserError(
        f"{what}: the DataLoader's {type(sampler).__name__} chooses samples in a way of its own, and a session has "
        "each sample once an epoch, in order or shuffled; use shuffle=True or False, or a torch.utils.data.Subset "
        "of the samples"
    )
