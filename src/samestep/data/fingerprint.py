"""What tells one data set from another: the number of its samples, and hashes of them.

A data set that is held in arrays counts whole. Of any other, which only Python knows, rows are read in an order that
spreads them over the whole set (the first, the last, then halves, quarters, ...), as many as some seconds allow; so
two looks at a set, of which one was slower, have a beginning in common. Each part of a row counts by itself, such as
its inputs and its labels. A part that isn't the same when a row is read again is drawn at random, and does not count.
"""

import hashlib
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from annotated_types import Ge
from numpy.typing import NDArray
from pydantic import ConfigDict, Strict
from torch.utils.data import TensorDataset

from samestep.data.canonical import Canonical, Hashed
from samestep.data.types import Samples, WholeDigest
from samestep.recording import generators

_MOST_ROWS = 1 << 16
_LEAST_ROWS = 16  # however long they take
_SECONDS = 1.0  # of reading rows
_SMALL, _SECONDS_OF_SMALL = 1 << 12, 4.0  # a set of so many rows is read whole, if this is enough
_ROWS_AGAIN = 512  # that are read again
_SECONDS_AGAIN = 0.5
_REPEATS = 6  # of reading again where rows differ from those of before: is it chance?
_MOST_BYTES = 1 << 30  # of tensors that count whole
_MOST_PARTS = 16  # of a row
_SUMS, _COLUMNS = 2, 16  # of real numbers: so many sums with other weights, of columns that may have other units
_BLOCK = 1 << 12  # positions with weights of their own
_AT_ONCE = 1 << 18  # numbers that are summed at once
_ROUNDING, _ROUNDING_OF_FLOAT64 = 1e-6, 1e-12  # of the norm, by which sums may differ
_GROUPS, _FEW = 32, 4  # groups of rows; where fewer than a fourth of them differ, that is no rounding

_Text = Annotated[str, Strict()]
_Number = Annotated[float, Strict()]


@dataclass(frozen=True, kw_only=True)
class Mark:
    """Hashes of values, and where there are real numbers among them, sums by which rounding is told from a change.

    A sum over many numbers may be rounded otherwise with another number of threads, and so a mean that is taken from
    all of them: that moves many values by their last bits, and the sums by next to nothing.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    exact: _Text
    coarse: _Text = ""  # without the real numbers
    groups: tuple[_Text, ...] = ()  # of groups of rows, exact
    # Of the real numbers, by their columns: sums with weights by their places, then the squares.
    sums: tuple[tuple[_Number, ...], ...] = ()
    rounding: _Number = 0.0  # by which sums may differ, as a part of the norm

    def is_as(self, other: "Mark") -> bool:
        """Whether the values are the same, but for rounding."""
        if self.exact == other.exact:
            return True
        if self.coarse != other.coarse or not self.sums or not other.sums:
            return False
        pairs = list(zip(self.groups, other.groups, strict=False))
        moved = sum(one != another for one, another in pairs)
        if len(self.groups) != len(other.groups) or moved <= len(pairs) / _FEW:
            return False  # rounding moves more of them
        *sums, squares = np.abs(np.subtract(self.sums, other.sums))
        most = max(self.rounding, other.rounding) * np.sqrt(np.maximum(self.sums[-1], other.sums[-1]))
        return bool(np.all(np.array(sums) <= most) and np.all(squares <= most * np.sqrt(self.sums[-1])))


@dataclass(frozen=True, kw_only=True)
class SamplesIdentity:
    """What a data set is known by."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    samples: Annotated[int, Strict(), Ge(0)]
    whole: Mark | None = None  # of all samples; None: rows stand for them
    rows: Annotated[int, Strict(), Ge(0)] = 0  # that were read
    # By part of a row: hashes of it in the first row, the first 2, 4, 8, ... rows, and all that were read; None for
    # a part that those rows didn't have.
    parts: Mapping[str, tuple[Mark | None, ...]] = field(default_factory=dict)
    drawn: tuple[_Text, ...] = ()  # the parts that are drawn at random
    unknown: tuple[_Text, ...] = ()  # the types of values that have no hash

    @property
    def is_whole(self) -> bool:
        """Whether every sample counts, with all of its parts."""
        return self.whole is not None or (self.rows == self.samples and not self.drawn and not self.unknown)


def identify(samples: Samples, *, repeats: int = 1) -> SamplesIdentity:
    """Look at a data set. `repeats`: how often rows are read again, to see what is drawn at random.

    Reading rows leaves the global random number generators as they were.
    """
    if (whole := _whole(samples)) is not None:
        return SamplesIdentity(samples=len(samples), whole=whole)
    look = _Look(samples)
    with generators.kept():
        look.read()
        for _ in range(repeats):
            look.read_again()
    return look.result()


def compare(samples: Samples, before: SamplesIdentity) -> tuple[SamplesIdentity, str | None]:
    """Look at a data set, and say how it differs from what was known of it; None where it doesn't."""
    now = identify(samples)
    if difference(before, now) is not None and now.whole is None and now.samples == before.samples:
        now = identify(samples, repeats=_REPEATS)
    return now, difference(before, now)


def difference(before: SamplesIdentity, now: SamplesIdentity) -> str | None:
    """How a data set differs from what was known of it, as the end of a sentence; None where it doesn't."""
    if before.samples != now.samples:
        return f"has {now.samples:,} samples, and had {before.samples:,}"
    if before.whole is not None and now.whole is not None:
        return None if now.whole.is_as(before.whole) else f"has {now.samples:,} samples as before, of other contents"
    if before.whole is not None or now.whole is not None:
        return None  # see `is_comparable`
    shared = [rows for rows in _marks(now.rows) if rows in _marks(before.rows)]
    if not shared:
        return None
    random_parts = {*before.drawn, *now.drawn}
    other = [
        part
        for part in dict.fromkeys([*before.parts, *now.parts])
        if part not in random_parts and not _same(_at(before, part, shared[-1]), _at(now, part, shared[-1]))
    ]
    if not other:
        return None
    what = ", ".join(_named(part) for part in other[:4]) + (", ..." if len(other) > 4 else "")
    where = "" if other == [_ALL] else f" (in {what})"
    return f"has {now.samples:,} samples as before, of other contents{where}"


def is_comparable(before: SamplesIdentity, now: SamplesIdentity) -> bool:
    """Whether both looks are of one kind: of arrays as a whole, or of rows."""
    return (before.whole is None) == (now.whole is None)


def _named(part: str) -> str:
    """A part of a row, for a message: a key, or a place in a tuple."""
    return f"part {part}" if part.isdecimal() else f'"{part}"'


def _marks(rows: int) -> list[int]:
    """The numbers of rows for which there are hashes, if so many were read."""
    return sorted({1 << power for power in range(rows.bit_length())} | {rows}) if rows else []


def _same(one: Mark | None, other: Mark | None) -> bool:
    """Whether a part of some rows is the same."""
    return one is other if one is None or other is None else one.is_as(other)


def _at(identity: SamplesIdentity, part: str, rows: int) -> Mark | None:
    """The hashes of a part in the first so many rows; None for a part that isn't there."""
    hashes = identity.parts.get(part, ())
    number = _marks(identity.rows).index(rows)
    return hashes[number] if number < len(hashes) else None


def _whole(samples: Samples) -> Mark | None:
    """The hashes of all samples of a data set that is held in arrays; None for others, and for very large ones."""
    if isinstance(samples, WholeDigest):
        return Mark(exact=samples.digest())
    held: Any = samples.tensors if type(samples) is TensorDataset else samples
    tensors = held if isinstance(held, tuple) else (held,)
    if not all(type(tensor) in (torch.Tensor, np.ndarray) for tensor in tensors):
        return None
    if sum(tensor.nbytes for tensor in tensors) > _MOST_BYTES:
        return None
    canonical, chain = Canonical(), _Chain()
    width = max(1, sum(tensor.nbytes // tensor.itemsize for tensor in tensors) // max(1, len(samples)))
    for number in range(_GROUPS):
        of_group = slice(number * len(samples) // _GROUPS, (number + 1) * len(samples) // _GROUPS)
        chain.add(number, canonical.hashed([tensor[of_group] for tensor in tensors]), width)
    return None if canonical.unknown else chain.mark()


class _Chain:
    """Hashes and sums of one part of many rows."""

    def __init__(self) -> None:
        self._exact, self._coarse = hashlib.sha256(), hashlib.sha256()
        self._groups: dict[int, int] = {}
        self._sums = np.zeros((_SUMS + 1, _COLUMNS))
        self._rounding: float | None = None  # None: no real numbers yet
        # Rows whose numbers are yet to be summed, all of one length, by their places: many at once are faster.
        self._waiting: dict[bytes, NDArray[np.float64]] = {}

    def add(self, index: int, value: Hashed, width: int | None = None) -> None:
        """Add the part of a row, or of many rows with `width` real numbers each."""
        place = index.to_bytes(8, "little")
        self._exact.update(place + value.exact)
        self._coarse.update(place + value.coarse)
        group = index % _GROUPS
        own = zlib.crc32(value.exact, index % 2**32)
        self._groups[group] = (self._groups.get(group, 0) + own) % 2**32
        if len(value.reals):
            self._rounding = max(self._rounding or 0.0, _ROUNDING if value.is_rounded else _ROUNDING_OF_FLOAT64)
            self._add_reals(place, value.reals, width)

    def _add_reals(self, place: bytes, reals: NDArray[np.float64], width: int | None) -> None:
        """Add the real numbers of a part; they are summed with those of other rows, if there are few."""
        if width is not None or len(reals) > _BLOCK:
            self._sum_blocks(place, reals, width or len(reals))
            return
        if self._waiting and len(next(iter(self._waiting.values()))) != len(reals):
            self._sum()
        self._waiting[place] = reals
        if len(self._waiting) * len(reals) >= _AT_ONCE:
            self._sum()

    def _sum_blocks(self, place: bytes, reals: NDArray[np.float64], width: int) -> None:
        """Sum many numbers, of rows of `width`, block by block; where whole rows fit, many blocks at once."""
        length = _BLOCK // width * width or _BLOCK
        at_once = _AT_ONCE // length * length if width <= _BLOCK else length
        for start in range(0, len(reals), at_once):
            numbers = reals[start : start + at_once]
            whole = len(numbers) // length * length
            for block in (numbers[:whole].reshape(-1, length), numbers[None, whole:]):
                if block.size:
                    at = start + (whole if block.shape[1] < length else 0)
                    places = [place + (at + row * length).to_bytes(8, "little") for row in range(len(block))]
                    self._sums += _projected(block, _weights(places), at, width)

    def _sum(self) -> None:
        """Sum the numbers of the rows that wait for it."""
        if self._waiting:
            rows = np.stack(list(self._waiting.values()))
            self._sums += _projected(rows, _weights(list(self._waiting)), 0, rows.shape[1])
            self._waiting.clear()

    def mark(self) -> Mark:
        """What is known of the rows so far."""
        self._sum()
        exact, coarse = (chain.hexdigest()[:32] for chain in (self._exact, self._coarse))
        if self._rounding is None or not np.isfinite(self._sums).all():  # numbers too large for their squares
            return Mark(exact=exact)
        groups = tuple(f"{self._groups[group]:08x}" for group in sorted(self._groups))
        sums = tuple(tuple(row) for row in self._sums.tolist())
        return Mark(exact=exact, coarse=coarse, groups=groups, sums=sums, rounding=self._rounding)


def _weights(places: Sequence[bytes]) -> NDArray[np.float64]:
    """Numbers from -1 to 1 that belong to places [places, sums]."""
    raw = b"".join(hashlib.blake2b(place, digest_size=8 * _SUMS).digest() for place in places)
    return (np.frombuffer(raw, dtype="<u8") / 2**63 - 1).reshape(-1, _SUMS)


@cache
def _position_weights() -> NDArray[np.float64]:
    """Numbers from -1 to 1 for the positions of a block [sums, positions]."""
    raw = np.random.Philox(0).random_raw(_SUMS * _BLOCK)
    return (raw / 2**63 - 1).reshape(_SUMS, _BLOCK)


def _projected(
    rows: NDArray[np.float64], weights: NDArray[np.float64], start: int, width: int
) -> NDArray[np.float64]:
    """Weighted sums of real numbers, and of their squares, by their columns [sums + 1, columns].

    `rows` [rows, positions] with their `weights` [rows, sums]; the first position is the number `start` of what has
    `width` numbers a row. Of each number the inverse hyperbolic sine counts, which is the number itself near 0 and
    grows as its logarithm: else one large number, such as a time stamp or a mark of a missing value, would allow all
    others of its column to change.
    """
    rows = np.arcsinh(rows)
    columns = np.arange(start, start + rows.shape[1]) % width % _COLUMNS
    sums = np.zeros((_SUMS + 1, _COLUMNS))
    with np.errstate(over="ignore", invalid="ignore"):
        weighted = (weights.T @ rows) * _position_weights()[:, : rows.shape[1]]  # [sums, positions]
        for number, values in enumerate([*weighted, (rows * rows).sum(axis=0)]):
            sums[number] = np.bincount(columns, weights=values, minlength=_COLUMNS)
    return sums


class _Look:
    """Reads rows of a data set, and hashes their parts."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples
        self._canonical = Canonical()
        self._first: list[tuple[int, Mapping[str, bytes]]] = []  # rows that are read again: index, hashes of parts
        self._chains: dict[str, _Chain] = {}
        self._hashes: dict[str, list[Mark | None]] = {}
        self._rows = 0
        self._drawn: set[str] = set()

    def read(self) -> None:
        """Read as many rows as time allows."""
        size = len(self._samples)
        until = time.monotonic() + (_SECONDS if size > _SMALL else _SECONDS_OF_SMALL)
        for index in islice(_spread(size), _MOST_ROWS):
            if self._rows >= _LEAST_ROWS and time.monotonic() > until:
                break
            parts = self._parts(index)
            if self._rows < _ROWS_AGAIN:
                self._first.append((index, {part: value.exact for part, value in parts.items()}))
            self._add(index, parts)
        self._mark()

    def _add(self, index: int, parts: Mapping[str, Hashed]) -> None:
        """Add a row to the hashes of its parts."""
        for part, value in parts.items():
            if part not in self._chains:
                self._chains[part] = _Chain()
                self._hashes[part] = [None] * self._rows.bit_length()
            self._chains[part].add(index, value)
        self._rows += 1
        if self._rows & (self._rows - 1) == 0:
            self._mark()

    def _mark(self) -> None:
        """Keep the hashes of the rows read so far, if that isn't done yet."""
        for part, chain in self._chains.items():
            if len(self._hashes[part]) < len(_marks(self._rows)):
                self._hashes[part].append(chain.mark())

    def read_again(self) -> None:
        """Read the first rows again, and note the parts that aren't what they were."""
        until = time.monotonic() + _SECONDS_AGAIN
        for number, (index, parts) in enumerate(self._first):
            if number >= _LEAST_ROWS and time.monotonic() > until:
                break
            again = {part: value.exact for part, value in self._parts(index).items()}
            self._drawn |= {part for part in {*parts, *again} if parts.get(part) != again.get(part)}

    def _parts(self, index: int) -> dict[str, Hashed]:
        """The hashes of each part of a row. A row that can't be read is known by its error."""
        hashed = self._canonical.hashed
        try:
            parts = dict(_flat(self._samples[index], _ALL, 2))
            if len(parts) > _MOST_PARTS:
                return {_ALL: hashed(parts)}
            return {name: hashed(value) for name, value in parts.items()}
        except Exception as error:  # whatever a user's code raises
            return {_ALL: hashed(type(error).__qualname__)}

    def result(self) -> SamplesIdentity:
        return SamplesIdentity(
            samples=len(self._samples),
            rows=self._rows,
            parts={part: tuple(hashes) for part, hashes in self._hashes.items() if part not in self._drawn},
            drawn=tuple(sorted(self._drawn)),
            unknown=tuple(sorted(self._canonical.unknown)),
        )


_ALL = "sample"  # the name of the part of a row that is one value


def _flat(value: Any, name: str, depth: int) -> Iterator[tuple[str, Any]]:
    """The parts of a row by name: the values of mappings and tuples, also of those inside them."""
    inner: list[tuple[str, Any]] = []
    if isinstance(value, Mapping):
        inner = [(str(key), item) for key, item in value.items()]
    elif isinstance(value, tuple) or (isinstance(value, list) and name == _ALL and len(value) == 2):
        inner = [(str(number), item) for number, item in enumerate(value)]
    if not inner or not depth or len(inner) > _MOST_PARTS:
        yield name, value
        return
    for key, nested in inner:
        yield from _flat(nested, key if name == _ALL else f"{name}.{key}", depth - 1)


def _spread(size: int) -> Iterator[int]:
    """All indices below `size`: the first, the last, then those that lie farthest from the ones before."""
    ends = list(dict.fromkeys((0, size - 1))) if size else []
    yield from ends
    bits = max(1, (size - 1).bit_length())
    for number in range(1, 1 << bits):
        index = int(f"{number:0{bits}b}"[::-1], 2)  # halves, then quarters, then eighths, ...
        if index < size and index not in ends:
            yield index
