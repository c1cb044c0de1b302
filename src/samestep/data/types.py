"""Types of data: data sets of samples, and batches of collated samples."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from samestep.errors import UserError, described


class _Pair(NamedTuple):
    """What a batch is unpacked into."""

    inputs: Any
    targets: Any


class Batch(_Pair):
    """A batch of collated samples: a pair, so that `inputs, targets = batch` holds.

    `inputs` is what the model is called with: a mapping becomes keywords, a tuple positions, anything else the one
    argument. `targets` is for the loss and the metrics; the model doesn't see it. `split` says how many rows of a
    tensor each sample has, in the samples' order, where a model joins the samples' rows in one first dimension, such
    as the nodes of graphs; a list of such lists where tensors differ in that.
    """

    split: Any = None

    def __new__(cls, inputs: Any, targets: Any, split: Any = None) -> "Batch":
        batch = super().__new__(cls, inputs, targets)
        batch.split = split
        return batch


@runtime_checkable
class Samples(Protocol):
    """A data set with a length; a sample is found by its index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class WholeDigest(ABC):
    """A data set that is held in arrays, with a hash of all its samples."""

    @abstractmethod
    def digest(self) -> str:
        """The hash of all samples, the same wherever these samples are in this order."""


class First(Sequence[Any]):
    """The first samples of a data set."""

    def __init__(self, samples: Samples, most: int) -> None:
        self._samples = samples
        self._length = min(most, len(samples))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any, /) -> Any:
        if not -self._length <= index < self._length:
            raise IndexError(index)
        return self._samples[index % self._length]


def as_batch(collated: Any) -> Batch:
    """Convert a collate's result to a Batch. Raises UserError unless it is a pair of inputs and targets."""
    if isinstance(collated, Batch):
        return collated
    if isinstance(collated, (tuple, list)) and len(collated) == 2:
        return Batch(*collated)
    what = f"a {type(collated).__name__}"
    if isinstance(collated, Mapping):
        keys = ", ".join(str(key) for key in list(collated)[:6])
        what += f" with the keys {keys}" if keys else " without keys"
        fix = "use samestep.Batch(inputs, targets), whose inputs may be such a mapping"
    elif isinstance(collated, (tuple, list)):
        what += f" of {len(collated)}"
        fix = "use samestep.Batch(inputs, targets), whose inputs may be a tuple of several"
    else:
        what = "None" if collated is None else what
        fix = "use samestep.Batch(inputs, targets)"
    raise UserError(f"collate gave {what}; it must give a pair of inputs and targets: {fix}")


def splits_of(batch: Batch, samples: int) -> tuple[tuple[int, ...], ...]:
    """The numbers of rows of a batch's samples, of each kind of tensor. Raises UserError for what is none."""
    split = batch.split
    if split is None:
        return ()
    several = isinstance(split, (list, tuple)) and len(split) > 0 and not _is_number(split[0])
    kinds: Any = split if several else [split]
    numbers_of_rows: list[tuple[int, ...]] = []
    for kind in kinds:
        numbers = [int(number) for number in kind]
        if len(numbers) != samples or min(numbers, default=0) < 0:
            raise UserError(
                f"the batch's split has {len(numbers)} numbers ({', '.join(map(str, numbers[:6]))}) for {samples} "
                "samples; use the number of rows of each sample, in the samples' order"
            )
        numbers_of_rows.append(tuple(numbers))
    return tuple(numbers_of_rows)


def _is_number(value: Any) -> bool:
    return isinstance(value, int) or (hasattr(value, "ndim") and value.ndim == 0)


def missing_sample(samples: Any, index: int, error: Exception) -> str:
    """Describe that a data set has no sample at an index within its length."""
    return (
        f"a {type(samples).__name__} of length {len(samples)} gives no sample {index} ({described(error)}); use a "
        "__len__ that counts the samples that __getitem__ gives for 0, 1, 2, ..."
    )
