"""Rows of tokens as samples, one a sample or several packed into one; how many were cut and dropped.

Packing is best fit decreasing over the whole data set, so that which rows share a sample depends on the rows alone;
the order of samples is drawn from seed and epoch as that of any others.
"""

import hashlib
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from samestep.data.conversations import Tokens
from samestep.data.tokenizer import IGNORED
from samestep.data.types import WholeDigest


class TokenSample(NamedTuple):
    """The tokens of one row, or of several behind each other: all [tokens].

    Target i is the token after input i; where the next token doesn't count it is IGNORED. Positions begin at 0 with
    each row.
    """

    inputs: NDArray[np.int64]
    targets: NDArray[np.int64]
    positions: NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class TokenRows:
    """Rows of tokens behind each other in one array; row i is ids[starts[i] : starts[i + 1]]."""

    ids: NDArray[np.int32]  # [tokens]
    counts: NDArray[np.bool_]  # [tokens]
    starts: NDArray[np.int64]  # [rows + 1]
    numbers: NDArray[np.int64]  # [rows] their numbers in the source
    cut: int = 0  # rows that were longer than the most
    dropped: int = 0  # rows that are left out: nothing of them would count, or they are too long

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """How many tokens of each row are inputs: all but its last, [rows]."""
        return np.diff(self.starts) - 1

    def row(self, index: int) -> Tokens:
        """The tokens of a row."""
        part = slice(int(self.starts[index]), int(self.starts[index + 1]))
        return Tokens(ids=self.ids[part], counts=self.counts[part])


def fitted(rows: Iterable[Tokens], *, most: int, drop: bool) -> TokenRows:
    """Cut rows to `most` inputs, or drop longer ones; rows of which nothing counts then are left out."""
    ids: list[NDArray[np.int32]] = []
    counts: list[NDArray[np.bool_]] = []
    numbers: list[int] = []
    cut = dropped = 0
    for number, row in enumerate(rows):
        is_long = len(row.ids) > most + 1
        # The first token is nobody's next one.
        if (is_long and drop) or not row.counts[1 : most + 1].any():
            dropped += 1
            continue
        cut += is_long
        ids.append(row.ids[: most + 1])
        counts.append(row.counts[: most + 1])
        numbers.append(number)
    starts = np.cumsum([0, *map(len, ids)], dtype=np.int64)
    return TokenRows(
        ids=np.concatenate(ids) if ids else np.empty(0, dtype=np.int32),
        counts=np.concatenate(counts) if counts else np.empty(0, dtype=np.bool_),
        starts=starts,
        numbers=np.array(numbers, dtype=np.int64),
        cut=cut,
        dropped=dropped,
    )


class TokenSamples(WholeDigest):
    """Samples that are rows of tokens, or several rows each."""

    def __init__(self, rows: TokenRows, groups: Sequence[Sequence[int]] | None = None) -> None:
        """`groups`: the rows of each sample; None: one row a sample."""
        self.rows = rows
        self._groups = groups

    def __len__(self) -> int:
        return len(self.rows) if self._groups is None else len(self._groups)

    def __getitem__(self, index: int) -> TokenSample:
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        parts = [_sample(self.rows.row(number)) for number in self.rows_of(index % len(self))]
        return TokenSample(*map(np.concatenate, zip(*parts, strict=True)))

    def rows_of(self, index: int) -> Sequence[int]:
        """The rows of a sample, in their order."""
        return (index,) if self._groups is None else self._groups[index]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """The number of inputs of each sample, [samples]."""
        lengths = self.rows.lengths
        if self._groups is None:
            return lengths
        return np.array([lengths[list(group)].sum() for group in self._groups], dtype=np.int64)

    def digest(self) -> str:
        parts = hashlib.sha256()
        for array in (self.rows.ids.astype("<i4"), self.rows.counts, self.rows.starts.astype("<i8")):
            parts.update(array.tobytes())
        parts.update(repr(self._groups).encode())
        return parts.hexdigest()[:32]


def _sample(row: Tokens) -> TokenSample:
    targets = np.where(row.counts[1:], row.ids[1:], IGNORED).astype(np.int64)
    return TokenSample(row.ids[:-1].astype(np.int64), targets, np.arange(len(targets), dtype=np.int64))


def best_fit(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Groups of numbers of rows whose lengths add up to at most `room`: best fit decreasing.

    Longer rows come first, of equally long ones the one with the lower number; each goes to the fullest group that
    has room for it, of equally full ones to the oldest. Groups and their rows are in the order of their numbers.
    """
    groups: list[list[int]] = []
    free: list[int] = []  # the rooms that groups have left, ascending, each once
    with_free: dict[int, deque[int]] = {}  # room -> the groups that have it left
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        place = bisect_left(free, lengths[row])
        if place == len(free):
            group, left = len(groups), room
            groups.append([])
        else:
            left = free[place]
            group = with_free[left].popleft()
            if not with_free[left]:
                del with_free[left], free[place]
        groups[group].append(row)
        left -= lengths[row]
        if left not in with_free:
            with_free[left] = deque()
            insort(free, left)
        with_free[left].append(group)
    return sorted(sorted(group) for group in groups)
