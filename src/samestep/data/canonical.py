"""One hash for equal values, whatever the process, the host and the folder in which they are made.

Numbers, texts, arrays, tensors and images count by type and contents, mappings and sets without their order, objects
by their attributes. A path to a file counts by the file's name and contents, since a folder may be mounted elsewhere.
What none of this is for (functions, open files, locks) has no hash: its type is noted.

A second hash leaves out the values of real numbers, which are given besides: a sum over many of them may be rounded
otherwise with another number of threads.
"""

import hashlib
import struct
from collections.abc import Iterable, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from operator import itemgetter
from pathlib import Path, PurePath
from typing import Any
from uuid import UUID

import numpy as np
import torch
from numpy.typing import NDArray

_DEEPEST = 30
_LONGEST_PATH = 1024  # characters of a text that may be a path
_MOST_OF_FILE = 1 << 24  # bytes that count of a file that a path leads to
# Types of tensors that NumPy has.
_OF_NUMPY = {
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128),
}
_BY_TEXT = (date, datetime, time, timedelta, Decimal, Fraction, UUID, range, slice)


@dataclass(frozen=True, kw_only=True)
class Hashed:
    """The hashes of a value."""

    exact: bytes
    coarse: bytes  # without the values of real numbers
    reals: NDArray[np.float64]  # those values, in their order; 0 for each that is not finite, which `coarse` has
    is_rounded: bool  # whether some of them have fewer digits than float64


class _Hashes:
    """The hashes of a value that is being looked at."""

    def __init__(self) -> None:
        self._exact, self._coarse = hashlib.sha256(), hashlib.sha256()
        self._reals: list[NDArray[np.float64]] = []
        self._is_rounded = False

    def update(self, raw: bytes) -> None:
        self._exact.update(raw)
        self._coarse.update(raw)

    def add_reals(self, raw: bytes, values: NDArray[np.float64]) -> None:
        """Add real numbers [n], whose bytes are `raw`."""
        self._exact.update(raw)
        self._is_rounded |= len(raw) < values.nbytes
        with np.errstate(over="ignore", invalid="ignore"):
            is_finite = np.isfinite(values.sum())
        if not is_finite:  # usually for one that is not
            finite = np.isfinite(values)
            self._coarse.update(np.where(finite, 0.0, values).astype("<f8").tobytes())
            values = np.where(finite, values, 0.0)
        self._reals.append(values)

    def result(self) -> Hashed:
        reals = np.concatenate(self._reals) if self._reals else np.empty(0)
        exact, coarse = self._exact.digest()[:16], self._coarse.digest()[:16]
        return Hashed(exact=exact, coarse=coarse, reals=reals, is_rounded=self._is_rounded)


class Canonical:
    """Hashes values, and notes the types of those that it can't hash."""

    def __init__(self) -> None:
        self.unknown: set[str] = set()
        self._open: list[int] = []  # the objects that are being hashed, for those that hold themselves

    def hashed(self, value: Any) -> Hashed:
        """The hashes of a value, each [16]."""
        hashes = _Hashes()
        self._add(hashes, value)
        return hashes.result()

    def digest(self, value: Any) -> bytes:
        """The exact hash of a value [16]."""
        return self.hashed(value).exact

    def _add(self, hashes: _Hashes, value: Any) -> None:
        """Add a value to a hash: a letter for its kind, then its contents with their length."""
        if value is None or isinstance(value, (bool, np.bool_)):
            hashes.update(b"n" if value is None else b"b1" if value else b"b0")
        elif isinstance(value, torch.Tensor):
            self._add_tensor(hashes, value)
        elif isinstance(value, (np.ndarray, np.generic)):
            self._add_array(hashes, np.asarray(value))
        elif isinstance(value, Enum):
            _add_part(hashes, b"e", f"{type(value).__qualname__}.{value.name}".encode())
        elif isinstance(value, int):
            _add_part(hashes, b"i", str(value).encode() if abs(value) < 2**63 else hex(value).encode())
        elif isinstance(value, (float, complex)):
            hashes.update(b"f")
            numbers = (complex(value).real, complex(value).imag)
            hashes.add_reals(struct.pack("<dd", *numbers), np.array(numbers))
        elif isinstance(value, (bytes, bytearray, memoryview)):
            _add_part(hashes, b"y", bytes(value))
        elif isinstance(value, (str, PurePath)):
            self._add_text(hashes, value)
        elif isinstance(value, _BY_TEXT):
            _add_part(hashes, b"r", repr(value).encode())
        else:
            self._add_holder(hashes, value)

    def _add_text(self, hashes: _Hashes, value: str | PurePath) -> None:
        """Add a text, or the name and contents of the file that it leads to."""
        text = str(value)
        if isinstance(value, PurePath) or (text.startswith("/") and len(text) < _LONGEST_PATH and "\n" not in text):
            file = Path(text)
            with suppress(OSError, ValueError):
                if file.is_file():
                    with file.open("rb") as stream:
                        content = stream.read(_MOST_OF_FILE)
                    _add_part(hashes, b"p", f"{file.name} {file.stat().st_size}".encode())
                    _add_part(hashes, b"y", content)
                    return
            text = value.name if isinstance(value, PurePath) else text
        _add_part(hashes, b"s", text.encode("utf-8", "surrogatepass"))

    def _add_array(self, hashes: _Hashes, array: NDArray[Any]) -> None:
        """Add an array: its type, its shape, and its values in C's order, little-endian."""
        if array.dtype.hasobject:
            _add_part(hashes, b"o", f"{array.shape}".encode())
            self._add_each(hashes, array.ravel().tolist())
            return
        array = array.astype(array.dtype.newbyteorder("<"), copy=False)
        _add_part(hashes, b"a", f"{array.dtype} {array.shape}".encode())
        _add_numbers(hashes, array)

    def _add_tensor(self, hashes: _Hashes, tensor: torch.Tensor) -> None:
        """Add a tensor: its type, its shape, and its values; a sparse one as a dense one."""
        if type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.dtype in _OF_NUMPY:
            array = tensor.numpy(force=True)
            _add_part(hashes, b"t", f"{tensor.dtype} {array.shape}".encode())
            _add_numbers(hashes, array)
            return
        try:
            plain = tensor.detach()
            plain = plain.to_dense() if plain.layout is not torch.strided else plain
            plain = plain.as_subclass(torch.Tensor).cpu()
            raw = plain.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy()
        except (RuntimeError, NotImplementedError, TypeError):  # of a kind without values in memory
            self._note(hashes, tensor)
            return
        _add_part(hashes, b"t", f"{plain.dtype} {tuple(plain.shape)}".encode())
        if plain.is_floating_point() or plain.is_complex():
            reals = torch.view_as_real(plain.resolve_conj()) if plain.is_complex() else plain
            hashes.add_reals(raw.tobytes(), reals.reshape(-1).double().numpy())
        else:
            _add_part(hashes, b"y", raw.tobytes())

    def _add_holder(self, hashes: _Hashes, value: Any) -> None:
        """Add what holds other values."""
        if id(value) in self._open:
            hashes.update(b"@")
            return
        if len(self._open) >= _DEEPEST:
            self._note(hashes, value)
            return
        self._open.append(id(value))
        try:
            self._add_inside(hashes, value)
        finally:
            self._open.pop()

    def _add_inside(self, hashes: _Hashes, value: Any) -> None:
        """Add the values that another one holds."""
        if isinstance(value, (list, tuple)):
            hashes.update(b"l")
            self._add_each(hashes, value)
        elif isinstance(value, Mapping):
            hashes.update(b"d")
            items = sorted(((self.digest(key), inner) for key, inner in value.items()), key=itemgetter(0))
            self._add_each(hashes, items)
        elif isinstance(value, Set):
            hashes.update(b"u")
            self._add_each(hashes, sorted(map(self.digest, value)))
        elif (module := type(value).__module__.partition(".")[0]) == "PIL" and hasattr(value, "tobytes"):
            _add_part(hashes, b"g", f"{value.mode} {value.size} {value.getpalette()}".encode())
            _add_part(hashes, b"y", value.tobytes())
        elif module == "pandas" and hasattr(value, "to_dict"):
            self._add(hashes, value.to_dict())
        elif module == "pyarrow" and hasattr(value, "as_py"):
            self._add(hashes, value.as_py())
        elif isinstance(value, type) or (attributes := _attributes(value)) is None:
            self._note(hashes, value)
        else:
            _add_part(hashes, b"c", type(value).__qualname__.encode())
            self._add(hashes, attributes)

    def _add_each(self, hashes: _Hashes, values: Any) -> None:
        """Add each value of a sequence, and how many they are."""
        hashes.update(len(values).to_bytes(8, "little"))
        for value in values:
            self._add(hashes, value)

    def _note(self, hashes: _Hashes, value: Any) -> None:
        """Add the type of what has no hash, and note it."""
        name = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
        self.unknown.add(name)
        _add_part(hashes, b"?", name.encode())


def _add_part(hashes: _Hashes, kind: bytes, raw: bytes) -> None:
    """Add bytes with their kind and length, so that "ab", "c" and "a", "bc" differ."""
    hashes.update(kind + len(raw).to_bytes(8, "little"))
    hashes.update(raw)


def _add_numbers(hashes: _Hashes, array: NDArray[Any]) -> None:
    """Add the values of an array: complex ones as their real parts, then their imaginary ones."""
    if array.dtype.kind == "f":
        hashes.add_reals(array.tobytes(), array.ravel().astype(np.float64))
    elif array.dtype.kind == "c":
        both = np.concatenate([np.real(array).ravel(), np.imag(array).ravel()])
        hashes.add_reals(both.tobytes(), both.astype(np.float64))
    else:
        _add_part(hashes, b"y", array.tobytes())


def _attributes(value: Any) -> dict[str, Any] | None:
    """The attributes of an object; None for one that has none of its own, such as a function or an open file."""
    if is_dataclass(value):
        return {field.name: getattr(value, field.name, None) for field in fields(value)}
    if callable(value) and not hasattr(value, "__len__"):
        return None
    held = dict(getattr(value, "__dict__", {}))
    for name in _slots(type(value)):
        with suppress(AttributeError):
            held[name] = getattr(value, name)
    return held or None


def _slots(kind: type) -> Iterable[str]:
    """The names of a class's slots, with those of its bases."""
    for base in kind.__mro__:
        slots = base.__dict__.get("__slots__", ())
        yield from (name for name in ((slots,) if isinstance(slots, str) else slots) if not name.startswith("__"))
