"""Tokenised texts as a data set: all ids in one array, a sample is a slice of it."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


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
