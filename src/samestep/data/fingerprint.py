"""What tells one data set from another: the number of its samples, and hashes of them.

A data set that is held in arrays counts whole. Of any other, which only Python knows, rows are read in an order that
spreads them over the whole set (the first, the last, then halves, quarters, ...), as many as some seconds allow; so
two looks at a set, of which one was slower, have a beginning in common. Each part of a row counts by itself, such as
its inputs and its labels. A part that isn't the same when a row is read again is drawn at random, and does not count.
"""

import hashlib
import random
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from annotated_types import Ge
from pydantic import ConfigDict, Strict
from torch.utils.data import TensorDataset

from samestep.data.canonical import Canonical
from samestep.data.types import Samples, WholeDigest

_MOST_ROWS = 1 << 16
_LEAST_ROWS = 16  # however long they take
_SECONDS = 1.0  # of reading rows
_SMALL, _SECONDS_OF_SMALL = 1 << 12, 4.0  # a set of so many rows is read whole, if this is enough
_ROWS_AGAIN = 512  # that are read again
_SECONDS_AGAIN = 0.5
_REPEATS = 6  # of reading again where rows differ from those of before: is it chance?
_MOST_BYTES = 1 << 30  # of tensors that count whole
_MOST_PARTS = 16  # of a row

_Text = Annotated[str, Strict()]


@dataclass(frozen=True, kw_only=True)
class SamplesIdentity:
    """What a data set is known by."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    samples: Annotated[int, Strict(), Ge(0)]
    digest: _Text | None = None  # of all samples; None: rows stand for them
    rows: Annotated[int, Strict(), Ge(0)] = 0  # that were read
    # By part of a row: hashes of it in the first row, the first 2, 4, 8, ... rows, and all that were read.
    parts: Mapping[str, tuple[_Text, ...]] = field(default_factory=dict)
    drawn: tuple[_Text, ...] = ()  # the parts that are drawn at random
    unknown: tuple[_Text, ...] = ()  # the types of values that have no hash

    @property
    def is_whole(self) -> bool:
        """Whether every sample counts, with all of its parts."""
        return self.digest is not None or (self.rows == self.samples and not self.drawn and not self.unknown)


def identify(samples: Samples, *, repeats: int = 1) -> SamplesIdentity:
    """Look at a data set. `repeats`: how often rows are read again, to see what is drawn at random.

    Reading rows leaves the global random number generators as they were.
    """
    if (digest := _whole(samples)) is not None:
        return SamplesIdentity(samples=len(samples), digest=digest)
    look = _Look(samples)
    with _generators_kept():
        look.read()
        for _ in range(repeats):
            look.read_again()
    return look.result()


def compare(samples: Samples, before: SamplesIdentity) -> tuple[SamplesIdentity, str | None]:
    """Look at a data set, and say how it differs from what was known of it; None where it doesn't."""
    now = identify(samples)
    if difference(before, now) is not None and now.digest is None and now.samples == before.samples:
        now = identify(samples, repeats=_REPEATS)
    return now, difference(before, now)


def difference(before: SamplesIdentity, now: SamplesIdentity) -> str | None:
    """How a data set differs from what was known of it, as the end of a sentence; None where it doesn't."""
    if before.samples != now.samples:
        return f"has {now.samples:,} samples, and had {before.samples:,}"
    if before.digest is not None and now.digest is not None:
        return None if before.digest == now.digest else f"has {now.samples:,} samples as before, of other contents"
    if before.digest is not None or now.digest is not None:
        return None  # it is held otherwise than before, so that nothing can be compared
    shared = [rows for rows in _marks(now.rows) if rows in _marks(before.rows)]
    if not shared:
        return None
    random_parts = {*before.drawn, *now.drawn}
    other = [
        part
        for part in dict.fromkeys([*before.parts, *now.parts])
        if part not in random_parts and _at(before, part, shared[-1]) != _at(now, part, shared[-1])
    ]
    if not other:
        return None
    what = ", ".join(_named(part) for part in other[:4]) + (", ..." if len(other) > 4 else "")
    where = "" if other == [_ALL] else f" (in {what})"
    return f"has {now.samples:,} samples as before, of other contents{where}"


def _named(part: str) -> str:
    """A part of a row, for a message: a key, or a place in a tuple."""
    return f"part {part}" if part.isdecimal() else f'"{part}"'


def _marks(rows: int) -> list[int]:
    """The numbers of rows for which there are hashes, if so many were read."""
    return sorted({1 << power for power in range(rows.bit_length())} | {rows}) if rows else []


def _at(known: SamplesIdentity, part: str, rows: int) -> str | None:
    """The hash of a part in the first so many rows; None for a part that isn't there."""
    hashes = known.parts.get(part, ())
    number = _marks(known.rows).index(rows)
    return hashes[number] if number < len(hashes) else None


def _whole(samples: Samples) -> str | None:
    """The hash of all samples of a data set that is held in arrays; None for others, and for very large ones."""
    if isinstance(samples, WholeDigest):
        return samples.digest()
    held: Any = samples.tensors if type(samples) is TensorDataset else samples
    tensors = held if isinstance(held, tuple) else (held,)
    if not all(type(each) in (torch.Tensor, np.ndarray) for each in tensors):
        return None
    if sum(each.nbytes for each in tensors) > _MOST_BYTES:
        return None
    canonical = Canonical()
    digest = canonical.digest(list(tensors)).hex()
    return None if canonical.unknown else digest


class _Look:
    """Reads rows of a data set, and hashes their parts."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples
        self._canonical = Canonical()
        self._first: list[tuple[int, Mapping[str, bytes]]] = []  # rows that are read again: index, hashes of parts
        self._chains: dict[str, hashlib._Hash] = {}
        self._hashes: dict[str, list[str]] = {}
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
                self._first.append((index, parts))
            self._add(index, parts)
        self._mark()

    def _add(self, index: int, parts: Mapping[str, bytes]) -> None:
        """Add a row to the hashes of its parts."""
        for part, digest in parts.items():
            if part not in self._chains:
                self._chains[part] = hashlib.sha256()
                self._hashes[part] = [""] * self._rows.bit_length()  # it wasn't in the rows before
            self._chains[part].update(index.to_bytes(8, "little") + digest)
        self._rows += 1
        if self._rows & (self._rows - 1) == 0:
            self._mark()

    def _mark(self) -> None:
        """Keep the hashes of the rows read so far, if that isn't done yet."""
        for part, chain in self._chains.items():
            if len(self._hashes[part]) < len(_marks(self._rows)):
                self._hashes[part].append(chain.hexdigest()[:32])

    def read_again(self) -> None:
        """Read the first rows again, and note the parts that aren't what they were."""
        until = time.monotonic() + _SECONDS_AGAIN
        for number, (index, parts) in enumerate(self._first):
            if number >= _LEAST_ROWS and time.monotonic() > until:
                break
            again = self._parts(index)
            self._drawn |= {part for part in {*parts, *again} if parts.get(part) != again.get(part)}

    def _parts(self, index: int) -> dict[str, bytes]:
        """The hash of each part of a row. A row that can't be read is known by its error."""
        try:
            parts = dict(_flat(self._samples[index], _ALL, 2))
            whole = len(parts) > _MOST_PARTS
            return (
                {_ALL: self._canonical.digest(parts)}
                if whole
                else {name: self._canonical.digest(value) for name, value in parts.items()}
            )
        except Exception as error:  # whatever a user's code raises
            return {_ALL: type(error).__qualname__.encode()}

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
        inner = [(str(key), each) for key, each in value.items()]
    elif isinstance(value, tuple) or (isinstance(value, list) and name == _ALL and len(value) == 2):
        inner = [(str(number), each) for number, each in enumerate(value)]
    if not inner or not depth or len(inner) > _MOST_PARTS:
        yield name, value
        return
    for key, each in inner:
        yield from _flat(each, key if name == _ALL else f"{name}.{key}", depth - 1)


def _spread(size: int) -> Iterator[int]:
    """All indices below `size`: the first, the last, then those that lie farthest from the ones before."""
    ends = list(dict.fromkeys((0, size - 1))) if size else []
    yield from ends
    bits = max(1, (size - 1).bit_length())
    for number in range(1, 1 << bits):
        index = int(f"{number:0{bits}b}"[::-1], 2)  # halves, then quarters, then eighths, ...
        if index < size and index not in ends:
            yield index


@contextmanager
def _generators_kept() -> Iterator[None]:
    """Put the global random number generators back to where they were."""
    pythons, numpys, torchs = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(pythons)
        np.random.set_state(numpys)
        torch.set_rng_state(torchs)
