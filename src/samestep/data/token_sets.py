"""Data sets of token ids: blocks of one length cut from a stream, and slices of one array."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

IGNORED = -100  # a target that the loss passes over, as torch's cross_entropy has it


class TokenBlocks:
    """Samples are (inputs, targets), both (length,); target i is the token behind input i.

    The last block is filled up with padding, whose targets are ignored.
    """

    def __init__(self, stream: NDArray[np.int32], *, length: int, padding: int) -> None:
        self._stream = stream  # (tokens,)
        self._length = length
        self._padding = padding

    def __len__(self) -> int:
        return -(-max(0, len(self._stream) - 1) // self._length)

    def __getitem__(self, index: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        start = index % len(self) * self._length
        taken = self._stream[start : start + self._length + 1]  # neighbours share one token
        inputs = np.full(self._length, self._padding, dtype=np.int64)
        targets = np.full(self._length, IGNORED, dtype=np.int64)
        inputs[: len(taken) - 1] = taken[:-1]
        targets[: len(taken) - 1] = taken[1:]
        return inputs, targets


class TokenisedTexts:
    """Samples are (token ids, class number)."""

    def __init__(self, ids: NDArray[np.int32], starts: NDArray[np.int64], classes: Sequence[int]) -> None:
        """`ids` are those of all texts, (tokens,); text i is ids[starts[i] : starts[i + 1]]."""
        self._ids = ids
        self._starts = starts  # (samples + 1,)
        self._classes = np.array(classes, dtype=np.int64)  # (samples,)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """The number of tokens of each sample, [samples]."""
        return np.diff(self._starts)

    def __len__(self) -> int:
        return len(self._classes)

    def __getitem__(self, index: int) -> tuple[NDArray[np.int32], int]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        index %= len(self)
        return self._ids[self._starts[index] : self._starts[index + 1]], int(self._classes[index])
