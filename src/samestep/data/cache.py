"""A cache on disk of prepared data: trained tokenizers and the token ids of texts, by the hash of what made them."""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from samestep import environment, private_folders
from samestep.data import tokenizer
from samestep.data.conversations import Encoder, Tokens
from samestep.data.records import Rows
from samestep.data.tokenizer import StreamTokenizer, TextTokenizer
from samestep.environment import cache_folder
from samestep.errors import UserError
from samestep.progress import phases
from samestep.version import VERSION

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Arrays = Mapping[str, NDArray[np.generic]]


@dataclass(frozen=True, kw_only=True)
class Kept:
    """Prepared data, and the checksum of their values."""

    arrays: Arrays
    checksum: str


# Characters of text below which the cache doesn't pay: computing is as fast as reading.
WORTH_KEEPING = 100_000

_LIMIT = 1024  # MB
_SUFFIX = ".safetensors"
_CHECKSUM = "sha256"
_READABLE = (SafetensorError, OSError, ValueError, KeyError)  # what reading a damaged file raises


@dataclass(frozen=True, kw_only=True)
class DataCache:
    """A folder of cached arrays, with at most `limit` bytes; 0 disables the cache.

    One to which other users could write is not used: they would decide what is trained on.
    """

    folder: Path
    limit: int

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> "DataCache":
        """Return the user's cache: the folder `data` of samestep's cache, with `SAMESTEP_CACHE_MB` as the limit.

        Raises UserError where that is not a number.
        """
        set_megabytes = environment.cache_megabytes(environ)
        if set_megabytes is not None and set_megabytes < 0:
            raise UserError(f"SAMESTEP_CACHE_MB is {set_megabytes}; use a number of megabytes, or 0 for no cache")
        megabytes = _LIMIT if set_megabytes is None else set_megabytes
        return cls(folder=cache_folder(environ) / "data", limit=megabytes * 10**6)

    def get(self, kind: str, key: str, make: Callable[[], Arrays]) -> Kept:
        """Return the arrays of a key; if they are missing or damaged, compute and store them."""
        if not self.limit or not private_folders.is_kept(self.folder):
            return _with_checksum(make())
        file = self.folder / f"{kind}-{key}{_SUFFIX}"
        kept = _read(file)
        if kept is None:
            kept = _with_checksum(make())
            with suppress(OSError):  # a full or read-only disk must not end the job
                self._write(file, kept)
                self._prune()
        return kept

    def _write(self, file: Path, kept: Kept) -> None:
        """Write to a temporary file and rename it, so that other processes see all of it or nothing."""
        handle, name = tempfile.mkstemp(dir=self.folder, suffix=".new")
        try:
            with os.fdopen(handle, "wb") as new:
                new.write(save(dict(kept.arrays), {_CHECKSUM: kept.checksum}))
            Path(name).replace(file)
        finally:
            Path(name).unlink(missing_ok=True)

    def _prune(self) -> None:
        """Remove the least recently used entries beyond the limit; other processes may prune at the same time."""
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


def _read(file: Path) -> Kept | None:
    """Read an entry; None if it is missing, damaged or another user's."""
    if not private_folders.is_private(file):
        return None
    try:
        with safe_open(file, framework="numpy") as entry:
            arrays = {name: entry.get_tensor(name) for name in entry.keys()}  # noqa: SIM118
            checksum = (entry.metadata() or {})[_CHECKSUM]
        kept = _with_checksum(arrays)
        if checksum != kept.checksum:
            return None
        os.utime(file)
    except _READABLE:
        return None
    return kept


def _with_checksum(arrays: Arrays) -> Kept:
    checksum = digest(*(part for name in sorted(arrays) for part in (name, arrays[name].tobytes())))
    return Kept(arrays=arrays, checksum=checksum)


def digest(*parts: str | bytes | int | Iterable[str]) -> str:
    """Hash values with their lengths, so that different lists of values never hash the same bytes."""
    hasher = hashlib.sha256()
    for part in parts:
        if isinstance(part, (str, bytes, int)):
            _add(hasher, part if isinstance(part, bytes) else str(part).encode())
        else:
            texts = list(part)
            _add(hasher, f"{len(texts)} texts".encode())
            for text in texts:
                _add(hasher, text.encode())
    return hasher.hexdigest()[:32]


def _add(hasher: "hashlib._Hash", raw: bytes) -> None:
    """Add a string with its length, so that "ab", "c" and "a", "bc" differ."""
    hasher.update(len(raw).to_bytes(8, "big"))
    hasher.update(raw)


@cache
def version_of_code() -> str:
    """Hash the code that makes entries: this folder's modules, and the versions of tokenizers and NumPy."""
    import tokenizers

    sources = [file.read_bytes() for file in sorted(Path(__file__).parent.glob("*.py"))]
    return digest(VERSION, tokenizers.__version__, np.__version__, *sources)


def text_tokenizer(texts: Sequence[str], vocabulary: int, cache: DataCache) -> TextTokenizer:
    """A tokenizer trained on the texts, for classification."""
    rules = _trained("text", texts, vocabulary, cache, lambda: tokenizer.train_text(texts, vocabulary).tokenizer)
    return TextTokenizer(tokenizer=rules, padding=tokenizer.TEXT_PADDING)


def stream_tokenizer(documents: Sequence[str], vocabulary: int, cache: DataCache) -> StreamTokenizer:
    """A byte-level tokenizer trained on the documents, for language models."""
    rules = _trained(
        "stream", documents, vocabulary, cache, lambda: tokenizer.train_stream(documents, vocabulary).tokenizer
    )
    return StreamTokenizer(tokenizer=rules, padding=tokenizer.STREAM_PADDING, end=tokenizer.STREAM_END)


def _trained(
    kind: str, texts: Sequence[str], vocabulary: int, cache: DataCache, train: Callable[[], "Tokenizer"]
) -> "Tokenizer":
    """Return the tokenizer trained on these texts, from the cache if it is there."""

    def make() -> Arrays:
        return {"json": np.frombuffer(train().to_str().encode(), dtype=np.uint8)}

    kept = _kept("tokenizer", texts, (kind, vocabulary), make, cache).arrays
    from tokenizers import Tokenizer

    return Tokenizer.from_str(kept["json"].tobytes().decode())


def sequences(
    texts: Sequence[str], with_tokenizer: TextTokenizer, max_length: int, cache: DataCache
) -> tuple[NDArray[np.int32], NDArray[np.int64], str]:
    """Encode all texts into one array of ids, (tokens,), and the offset of each text, (texts + 1,).

    Also returns the checksum of both.
    """

    def make() -> Arrays:
        encoded = with_tokenizer.encode(texts, max_length)
        ids = np.concatenate(encoded) if encoded else np.empty(0, dtype=np.int32)
        return {"ids": ids, "starts": np.array([0, *accumulate(map(len, encoded))], dtype=np.int64)}

    kept = _kept("sequences", texts, (max_length, _rules(with_tokenizer.tokenizer)), make, cache)
    return kept.arrays["ids"].view(np.int32), kept.arrays["starts"].view(np.int64), kept.checksum


def stream(
    documents: Sequence[str], with_tokenizer: StreamTokenizer, cache: DataCache
) -> tuple[NDArray[np.int32], str]:
    """Encode all documents into one array of ids, each followed by the end token, (tokens,), with its checksum."""

    def make() -> Arrays:
        return {"ids": with_tokenizer.stream(documents)}

    of = (str(with_tokenizer.end), _rules(with_tokenizer.tokenizer))
    kept = _kept("stream", documents, of, make, cache)
    return kept.arrays["ids"].view(np.int32), kept.checksum


def texts_of_rows(rows: Rows, numbers: Sequence[int]) -> list[str]:
    """Rows as texts, by which they are told apart."""
    return [json.dumps(rows[number], ensure_ascii=False, sort_keys=True, default=str) for number in numbers]


def encoded_rows(rows: Rows, numbers: Sequence[int], encoder: Encoder, cache: DataCache) -> list[Tokens]:
    """The tokens of some rows."""

    def make() -> Arrays:
        made = [encoder.encode(rows[number], rows.place(number)) for number in numbers]
        return {
            "ids": np.concatenate([row.ids for row in made]),
            "counts": np.concatenate([row.counts for row in made]).astype(np.uint8),
            "starts": np.array([0, *accumulate(len(row.ids) for row in made)], dtype=np.int64),
        }

    arrays = _kept("rows", texts_of_rows(rows, numbers), encoder.key(), make, cache).arrays
    ids, counts = arrays["ids"].view(np.int32), arrays["counts"].view(np.bool_)
    edges = arrays["starts"].view(np.int64).tolist()
    return [Tokens(ids=ids[a:b], counts=counts[a:b]) for a, b in pairwise(edges)]


def _rules(rules: "Tokenizer") -> str:
    """Serialize a tokenizer without the padding and truncation that were set last."""
    rules.no_padding()
    rules.no_truncation()
    return rules.to_str()


def _kept(
    kind: str, texts: Sequence[str], of: Sequence[str | int], make: Callable[[], Arrays], cache: DataCache
) -> Kept:
    """Return arrays from the cache, keyed by a hash of the texts, `of` and the code; short texts bypass the cache."""
    if sum(map(len, texts)) < WORTH_KEEPING:
        return _with_checksum(make())

    def told() -> Arrays:
        with phases.phase(f"preparing texts, for the cache: {kind}", once=kind):
            return make()

    return cache.get(kind, digest(version_of_code(), *of, texts), told)
