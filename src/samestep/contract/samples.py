"""The parts of the contract about data: samples found by their index, the same each time, and their collation."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from samestep.contract.errors import ContractError, line_of, said
from samestep.data.nests import equal
from samestep.data.sample_draws import sample_of
from samestep.data.types import Batch, as_batch
from samestep.parallel.exact import generators
from samestep.progress import phases
from samestep.tasks.base import Task, check_samples
from samestep.torch_internals import pytree

DATA, COLLATE = "data", "collate"
MOST = 12  # number of samples checked


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """Samples of a task's training set, short ones first, with their collation."""

    task: Task
    samples: Sequence[Any]
    indices: Sequence[int]  # of the samples, in the training set
    cut: int  # number of samples in the first of two parts of unequal size: 5 of 12
    sizes: Sequence[Sequence[int]] = ()  # elements of each tensor of each sample; empty if collate needs several

    def __len__(self) -> int:
        return len(self.samples)

    def batch(self, first: int, last: int) -> Batch:
        """Samples `first` to `last - 1`, collated again."""
        with said(COLLATE, f"collate of samples {first} to {last - 1}"):
            return as_batch(self.task.collate(self.samples[first:last]))

    def ordered(self, size: Sequence[Any], cut: int) -> "Sampled":
        """The same samples in the order of their sizes; those of one size as they are."""
        order = sorted(range(len(self)), key=lambda place: size[place])
        return replace(
            self,
            samples=[self.samples[place] for place in order],
            indices=[self.indices[place] for place in order],
            sizes=[self.sizes[place] for place in order],
            cut=cut,
        )

    def shorter_in_others(self) -> Iterator["Sampled"]:
        """Yield orders in which the first part has less padding in one tensor, such as a translation's targets.

        Inputs and targets are padded separately: samples with short inputs may have targets of full length.
        """
        if len({len(size) for size in self.sizes}) > 1:
            return
        sizes_before: set[tuple[int, ...]] = set()
        for size in zip(*self.sizes, strict=True):  # of one tensor, by sample
            shorter = sum(length < max(size) for length in size)
            if shorter and max(size[: self.cut]) == max(size) and size not in sizes_before:
                sizes_before.add(size)
                yield self.ordered(size, min(shorter, self.cut))


def _sampled(task: Task, samples: Sequence[Any], indices: Sequence[int]) -> Sampled:
    """Sort samples by size, so that the first part has less padding than the whole batch.

    A model that treats padding as tokens then gives other outputs for the part, which the check detects.
    """
    number = len(samples)
    cut = number * 5 // MOST if number >= MOST else number // 2
    sampled = Sampled(task=task, samples=samples, indices=indices, cut=cut)
    try:
        batches = [sampled.batch(place, place + 1) for place in range(number)]
    except ContractError:  # collate needs several samples
        return sampled
    sampled = replace(sampled, sizes=[_sizes(batch) for batch in batches])
    size = [sum(_sizes(batch[:1])) for batch in batches]
    shorter = _shorter_in_all(sampled.sizes)
    if not shorter:
        return sampled.ordered(size, cut)
    # Those that are shorter in every tensor come first, so that one order shows padding in any of them.
    return sampled.ordered([(place not in shorter, size[place]) for place in range(number)], min(len(shorter), cut))


def _shorter_in_all(sizes: Sequence[Sequence[int]]) -> set[int]:
    """The samples that are smaller than the largest in every tensor whose sizes differ; empty if there are none."""
    if len({len(sample) for sample in sizes}) > 1:
        return set()
    longest = [max(tensor) if min(tensor) < max(tensor) else None for tensor in zip(*sizes, strict=True)]
    if not any(longest):
        return set()
    return {
        place
        for place, sample in enumerate(sizes)
        if all(most is None or size < most for size, most in zip(sample, longest, strict=True))
    }


def _sizes(parts: Iterable[Any]) -> list[int]:
    """Count the elements of each tensor in a batch's inputs and targets."""
    nests = (dict(part) if isinstance(part, Mapping) else part for part in parts)
    return [leaf.numel() for nest in nests for leaf in pytree.tree_leaves(nest) if isinstance(leaf, Tensor)]


def take_samples(task: Task) -> Sampled:
    """Take the first samples. Raises ContractError for a sample that can't be read, or differs the second time."""
    with phases.phase("reading the data", once="data"), said(DATA, "train_set()", of=task.train_set):
        train_set = task.train_set()
        check_samples(train_set, "train_set()")
    indices = range(min(MOST, len(train_set)))
    samples = _same_samples(train_set, indices)
    with said(DATA, "train_set(), called again,", of=task.train_set):
        again = task.train_set()
    if again is not train_set:
        _check_alike(train_set, again, samples, task)
    return _sampled(task, samples, indices)


def take_others(task: Task) -> Sampled:
    """Take as many samples, evenly spaced over the whole set, for when none of the first ones counts in the loss."""
    train_set = task.train_set()
    last = len(train_set) - 1
    indices = [last * part // (MOST - 1) for part in range(MOST)]
    return _sampled(task, _same_samples(train_set, indices), indices)


def _same_samples(train_set: Any, indices: Sequence[int]) -> list[Any]:
    """Some samples, each taken twice. Raises ContractError where the two differ."""
    samples = [_sample(train_set, index) for index in indices]
    for index, sample in zip(indices, samples, strict=True):
        if not equal(sample, _sample(train_set, index)):
            raise ContractError(
                DATA,
                f"train_set()[{index}] gives another sample the second time, though the generators of torch, NumPy "
                "and Python were seeded alike before both; draw from these, or from a generator that is seeded with "
                "the index" + line_of(_getter(train_set)),
            )
    return samples


def _check_alike(train_set: Any, again: Any, samples: Sequence[Any], task: Task) -> None:
    """Raise ContractError where a second train_set() differs: every rank calls it and must get the same samples."""
    what = None
    if len(again) != len(train_set):
        what = f"a set of {len(train_set)} samples and then one of {len(again)}"
    elif not all(equal(sample, _sample(again, index)) for index, sample in enumerate(samples)):
        what = "other samples in the second call"
    if what is not None:
        raise ContractError(
            DATA,
            f"train_set() gives {what}, so every rank would have another set; shuffle and split with a generator "
            f"that is seeded{line_of(task.train_set)}",
        )


def check_collate(sampled: Sampled) -> None:
    """Raise ContractError where collating the same samples again gives something else."""

    def collated() -> tuple[Any, ...]:
        return tuple(sampled.batch(0, len(sampled)))

    before = generators.state(torch.device("cpu"))
    same = equal(collated(), collated())
    after = generators.state(torch.device("cpu"))
    if not same or generators.that_matters(before, after, collated, equal) is not None:
        raise ContractError(
            COLLATE,
            "collate draws random numbers, or gives something else the second time; every micro-batch is collated "
            "by itself, so draw in the data set, whose draws are seeded for each sample"
            + line_of(sampled.task.collate),
        )


def _sample(train_set: Any, index: int) -> Any:
    with said(DATA, f"train_set()[{index}], of a length of {len(train_set)},"):
        return sample_of(train_set, index)


def _getter(train_set: Any) -> Any:
    return getattr(type(train_set), "__getitem__", None)
