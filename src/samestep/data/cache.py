"""A cache on disk of prepared data: trained tokenizers and the token ids of texts.

An entry is a file of safetensors, named by a hash of all that it is a function of: the texts, the settings, and the
versions of the code and of the tokenizers library. So an entry is never out of date, only unused. Files are written
aside and renamed, by which several processes may write the same entry at once. The least recently used entries are
removed where all together exceed a limit.
"""

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from samestep import __version__, environment
from samestep.cache_folder import cache_folder
from samestep.errors import UserError

Arrays = Mapping[str, NDArray[np.generic]]

# What is made of fewer characters is made again as fast as it is found.
WORTH_KEEPING = 100_000

_LIMIT = 1024  # megabytes
_SUFFIX = ".safetensors"
_CHECKSUM = "sha256"
_READABLE = (SafetensorError, OSError, ValueError, KeyError)  # what reading a damaged file raises


@dataclass(frozen=True, kw_only=True)
class DataCache:
    """Entries in one folder, at most `limit` bytes of them; nothing is kept where that is 0."""

    folder: Path
    limit: int

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> "DataCache":
        """The user's: in the folder `data` of samestep's cache, with `SAMESTEP_CACHE_MB` as the limit.

        Raises UserError where that is no number.
        """
        asked = environment.cache_megabytes(environ)
        if asked is not None and asked < 0:
            raise UserError(f"SAMESTEP_CACHE_MB is {asked}; use a number of megabytes, or 0 for no cache")
        megabytes = _LIMIT if asked is None else asked
        return cls(folder=cache_folder(environ) / "data", limit=megabytes * 10**6)

    def get(self, kind: str, key: str, make: Callable[[], Arrays]) -> Arrays:
        """The arrays of a key, made and kept where there are none, or where their file is damaged."""
        if not self.limit:
            return make()
        file = self.folder / f"{kind}-{key}{_SUFFIX}"
        found = _read(file)
        if found is None:
            found = make()
            with suppress(OSError):  # a full or read-only disk is no reason to stop
                self._write(file, found)
                self._prune()
        return found

    def _write(self, file: Path, arrays: Arrays) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=self.folder, suffix=".new")
        try:
            with os.fdopen(handle, "wb") as new:
                new.write(save(dict(arrays), {_CHECKSUM: _checksum(arrays)}))
            Path(name).replace(file)
        finally:
            Path(name).unlink(missing_ok=True)

    def _prune(self) -> None:
        """Remove what was not used for longest, as far as the limit asks; other processes may do so too."""
        entries: list[tuple[float, int, Path]] = []
        for file in self.folder.glob(f"*{_SUFFIX}"):
            with suppress(FileNotFoundError):
                state = file.stat()
                entries.append((state.st_mtime, state.st_size, file))
        too_much = sum(size for _, size, _ in entries) - self.limit
        for _, size, file in sorted(entries):
            if too_much <= 0:
                return
            file.unlink(missing_ok=True)
            too_much -= size


def _read(file: Path) -> Arrays | None:
    """An entry; None where there is none, or what is there is damaged."""
    try:
        with safe_open(file, framework="numpy") as entry:
            found = {name: entry.get_tensor(name) for name in entry.keys()}  # noqa: SIM118
            said = (entry.metadata() or {})[_CHECKSUM]
        if said != _checksum(found):
            return None
        os.utime(file)
    except _READABLE:
        return None
    return found


def _checksum(arrays: Arrays) -> str:
    return digest(*(part for name in sorted(arrays) for part in (name, arrays[name].tobytes())))


def digest(*parts: str | bytes | int | Iterable[str]) -> str:
    """A hash of values, each with its length before it, so that no two lists of values look alike."""
    found = hashlib.sha256()
    for part in parts:
        if isinstance(part, (str, bytes, int)):
            _add(found, part if isinstance(part, bytes) else str(part).encode())
        else:
            texts = list(part)
            _add(found, f"{len(texts)} texts".encode())
            for text in texts:
                _add(found, text.encode())
    return found.hexdigest()[:32]


def _add(found: "hashlib._Hash", raw: bytes) -> None:
    found.update(len(raw).to_bytes(8, "big"))
    found.update(raw)


@cache
def version_of_code() -> str:
    """A hash of the code that makes entries: this folder's modules, and the tokenizers library's version."""
    import tokenizers

    sources = [file.read_bytes() for file in sorted(Path(__file__).parent.glob("*.py"))]
    return digest(__version__, tokenizers.__version__, np.__version__, *sources)
