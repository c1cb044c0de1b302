"""A stream of tokens cut into blocks of one length, as a data set: every token but the first is predicted once."""

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
