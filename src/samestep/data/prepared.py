"""Trained tokenizers and the token ids of texts, taken from the cache where an earlier process has made them.

What comes out is the same with the cache and without it: a tokenizer is read from its JSON in both cases.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from samestep.data import byte_pairs, tokenizer
from samestep.data.byte_pairs import StreamTokenizer
from samestep.data.cache import WORTH_KEEPING, Arrays, DataCache, digest, version_of_code
from samestep.data.tokenizer import TextTokenizer


def text_tokenizer(texts: Sequence[str], vocabulary: int, cache: DataCache) -> TextTokenizer:
    """A tokenizer trained on the texts, for classification."""
    rules = _trained("text", texts, vocabulary, cache, lambda: tokenizer.train(texts, vocabulary).tokenizer)
    return TextTokenizer(tokenizer=rules, padding=tokenizer.TRAINED_PADDING)


def stream_tokenizer(documents: Sequence[str], vocabulary: int, cache: DataCache) -> StreamTokenizer:
    """A byte-level tokenizer trained on the documents, for language models."""
    rules = _trained(
        "stream", documents, vocabulary, cache, lambda: byte_pairs.train(documents, vocabulary).tokenizer
    )
    return StreamTokenizer(tokenizer=rules, padding=byte_pairs.PADDING, end=byte_pairs.END)


def _trained(
    kind: str, texts: Sequence[str], vocabulary: int, cache: DataCache, train: Callable[[], Tokenizer]
) -> Tokenizer:
    def make() -> Arrays:
        return {"json": np.frombuffer(train().to_str().encode(), dtype=np.uint8)}

    found = _kept("tokenizer", texts, (kind, vocabulary), make, cache)
    return Tokenizer.from_str(found["json"].tobytes().decode())


def sequences(
    texts: Sequence[str], with_tokenizer: TextTokenizer, max_length: int, cache: DataCache
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """All texts' ids one after the other, (tokens,), and where each text starts and the last ends, (texts + 1,)."""

    def make() -> Arrays:
        found = with_tokenizer.encode(texts, max_length)
        ids = np.concatenate(found) if found else np.empty(0, dtype=np.int32)
        return {"ids": ids, "starts": np.array([0, *accumulate(map(len, found))], dtype=np.int64)}

    found = _kept("sequences", texts, (max_length, _rules(with_tokenizer.tokenizer)), make, cache)
    return found["ids"].view(np.int32), found["starts"].view(np.int64)


def stream(documents: Sequence[str], with_tokenizer: StreamTokenizer, cache: DataCache) -> NDArray[np.int32]:
    """The ids of all documents, each with the end token behind it. (tokens,)"""

    def make() -> Arrays:
        return {"ids": with_tokenizer.stream(documents)}

    of = (str(with_tokenizer.end), _rules(with_tokenizer.tokenizer))
    return _kept("stream", documents, of, make, cache)["ids"].view(np.int32)


def _rules(rules: Tokenizer) -> str:
    """All that a tokenizer's ids depend on, without the length that it was last asked for."""
    rules.no_padding()
    rules.no_truncation()
    return rules.to_str()


def _kept(
    kind: str, texts: Sequence[str], of: Sequence[str | int], make: Callable[[], Arrays], cache: DataCache
) -> Arrays:
    if sum(map(len, texts)) < WORTH_KEEPING:
        return make()
    return cache.get(kind, digest(version_of_code(), *of, texts), make)
