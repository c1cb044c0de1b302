"""Random numbers that a data set draws for a sample: a function of the seed, the epoch and the sample's index.

Augmentations draw from the global generators of PyTorch, NumPy or Python. Which numbers a sample got would depend on
what the process had drawn before: on the rank, the micro-batch, the loading process. So the three are seeded before
each sample, and restored after a batch of them. A sample then has the same augmentation in every layout and after a
resumption from a checkpoint, and another one in each epoch.
"""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from torch.utils.data import TensorDataset

from samestep.data.types import Samples, WholeDigest
from samestep.recording import generators

_BYTES = 8 + 8 + 4  # of the seeds of PyTorch, Python and NumPy


class EpochIndices(list[int]):
    """Indices of samples, with the epoch for which they are read. A list, as DataLoader's samplers give them."""

    def __init__(self, indices: Sequence[int] = (), epoch: int = 0) -> None:
        super().__init__(indices)
        self.epoch = epoch


class SeededSamples:
    """A data set whose samples draw from seeded generators; read by DataLoader, with `EpochIndices` for indices."""

    def __init__(self, samples: Samples, seed: int) -> None:
        self._samples = samples
        self._seed = seed
        # What is held in arrays or lists draws nothing; seeding would take longer than reading it.
        self._draws = not isinstance(samples, (WholeDigest, TensorDataset, list, tuple))
        self._together = getattr(samples, "__getitems__", None)

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        return self.read([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> Sequence[Any]:
        return self.read(indices)

    def read(self, indices: Sequence[int], taken: list[Any] | None = None) -> Sequence[Any]:
        """Return the samples of some indices, of epoch 0 unless they are `EpochIndices`.

        `taken`: a list that gets each sample as it is read one by one, so that its length says which one failed.
        """
        epoch = getattr(indices, "epoch", 0)
        if (set_epoch := getattr(self._samples, "set_epoch", None)) is not None:
            set_epoch(epoch)
        if not self._draws:
            return self._together(indices) if self._together is not None else self._one_by_one(indices, taken)
        with generators.kept():
            if self._together is not None:
                before = generators.states()
                samples = self._together(indices)
                if generators.same(before, generators.states()):
                    return samples
                self._together = None  # drawn for several samples at a time, the numbers would be the micro-batch's
            return self._one_by_one(indices, taken, epoch)

    def _one_by_one(self, indices: Sequence[int], taken: list[Any] | None, epoch: int | None = None) -> list[Any]:
        """Read samples one by one, seeded unless the epoch is None."""
        taken = [] if taken is None else taken
        several = getattr(self._samples, "__getitems__", None)
        for index in indices:
            if epoch is not None:
                seed_generators(self._seed, epoch, index)
            taken.append(self._samples[index] if several is None else several([index])[0])
        return taken


def sample_of(samples: Samples, index: int, *, seed: int = 0) -> Any:
    """Return a sample as the first epoch has it, and leave the generators as they are."""
    with generators.kept():
        if (set_epoch := getattr(samples, "set_epoch", None)) is not None:
            set_epoch(0)
        seed_generators(seed, 0, index)
        return samples[index]


def seed_generators(seed: int, epoch: int, index: int) -> None:
    """Seed PyTorch's, NumPy's and Python's global generators for one sample.

    By a hash, since neighbouring seeds of a Mersenne Twister may give numbers that are alike.
    """
    digest = blake2b(f"{seed} {epoch} {index}".encode(), digest_size=_BYTES).digest()
    generators.seed(
        int.from_bytes(digest[:8], "little", signed=True),
        int.from_bytes(digest[8:16], "little"),
        int.from_bytes(digest[16:], "little"),
    )
