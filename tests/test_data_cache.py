"""The cache of tokenizers and token ids: the same data with it and without, whatever has become of its files."""

import os
import random
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from samestep.data import tokenizer
from samestep.data.cache import Arrays, DataCache, digest, sequences, stream, stream_tokenizer, text_tokenizer
from samestep.errors import UserError

LIMIT = 10**8


def texts_of(seed: int, count: int = 2500) -> list[str]:
    """Texts of a small vocabulary, more than 100,000 characters in all."""
    draw = random.Random(seed)
    words = ["".join(draw.choices("abcdefghijklmnop", k=draw.randint(2, 9))) for _ in range(300)]
    return [" ".join(draw.choices(words, k=12)) for _ in range(count)]


TEXTS = texts_of(0)


def ids_of(texts: Sequence[str], cache: DataCache, length: int = 16) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    return sequences(texts, text_tokenizer(texts, 400, cache), length, cache)[:2]


def entries(cache: DataCache) -> list[Path]:
    return sorted(cache.folder.glob("*"))


@pytest.fixture
def cache(tmp_path: Path) -> DataCache:
    return DataCache(folder=tmp_path / "cache", limit=LIMIT)


def refuse_to_train(monkeypatch: pytest.MonkeyPatch) -> None:
    def trained(*_: object) -> None:
        raise AssertionError("trained again")

    monkeypatch.setattr(tokenizer, "train_text", trained)
    monkeypatch.setattr(tokenizer, "train_stream", trained)
    monkeypatch.setattr(tokenizer.TextTokenizer, "encode", trained)
    monkeypatch.setattr(tokenizer.StreamTokenizer, "stream", trained)


def test_a_hit_gives_the_ids_of_a_tokenizer_trained_now(cache: DataCache, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = tokenizer.train_text(TEXTS, 400).encode(TEXTS, 16)
    first = ids_of(TEXTS, cache)
    assert len(entries(cache)) == 2
    refuse_to_train(monkeypatch)
    for ids, starts in (first, ids_of(TEXTS, cache)):
        assert (ids.dtype, starts.dtype) == (np.int32, np.int64)
        found = [ids[start:end] for start, end in pairwise(starts)]
        assert [each.tolist() for each in found] == [each.tolist() for each in expected]


def test_a_stream_likewise(cache: DataCache, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = tokenizer.train_stream(TEXTS, 300).stream(TEXTS)
    first, _ = stream(TEXTS, stream_tokenizer(TEXTS, 300, cache), cache)
    refuse_to_train(monkeypatch)
    again, _ = stream(TEXTS, stream_tokenizer(TEXTS, 300, cache), cache)
    assert expected.tolist() == first.tolist() == again.tolist()


def test_another_text_length_or_vocabulary_is_another_entry(cache: DataCache) -> None:
    ids_of(TEXTS, cache)
    changed = [*TEXTS[:-1], TEXTS[-1] + " once"]
    fresh = DataCache(folder=cache.folder, limit=0)
    for texts, length in ((changed, 16), (TEXTS, 8)):
        before = len(entries(cache))
        found = ids_of(texts, cache, length)
        assert len(entries(cache)) > before
        assert all(np.array_equal(a, b) for a, b in zip(found, ids_of(texts, fresh, length), strict=True))
    before = len(entries(cache))
    text_tokenizer(TEXTS, 401, cache)
    assert len(entries(cache)) == before + 1


def test_texts_joined_otherwise_are_other_texts() -> None:
    assert len({digest(["ab", "c"]), digest(["a", "bc"]), digest("ab", "c"), digest(["abc"]), digest("a", "bc")}) == 5


@pytest.mark.parametrize("damage", ["cut", "empty", "one bit", "no checksum", "a folder"])
def test_a_damaged_entry_is_made_again(damage: str, cache: DataCache) -> None:
    expected = ids_of(TEXTS, cache)
    good = {file: file.read_bytes() for file in entries(cache)}
    for file, content in good.items():
        if damage == "a folder":
            file.unlink()
            file.mkdir()
        else:
            file.write_bytes(
                {
                    "cut": content[:-7],
                    "empty": b"",
                    "one bit": content[:-3] + bytes([content[-3] ^ 1]) + content[-2:],
                    "no checksum": content.replace(b"sha256", b"sha255", 1),
                }[damage]
            )
    found = ids_of(TEXTS, cache)
    assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))
    if damage != "a folder":  # which can't be replaced by a file; the data are made each time
        assert {file: file.read_bytes() for file in entries(cache)} == good


def test_what_can_not_be_written_is_made_each_time(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    ids, _ = ids_of(TEXTS, DataCache(folder=tmp_path / "file" / "data", limit=LIMIT))
    assert len(ids) > 0


def test_small_texts_are_not_kept(cache: DataCache) -> None:
    ids_of(TEXTS[:100], cache)
    assert entries(cache) == []


def test_what_was_not_used_for_longest_goes_first(tmp_path: Path) -> None:
    cache = DataCache(folder=tmp_path, limit=3000)

    def make() -> Arrays:
        return {"ids": np.zeros(250, dtype=np.int32)}  # 1000 bytes, and a header

    for age, key in enumerate(("old", "used", "newer")):
        cache.get("kind", key, make)
        if (file := tmp_path / f"kind-{key}.safetensors").exists():
            os.utime(file, (1000 + age, 1000 + age))
    assert [file.name for file in entries(cache)] == ["kind-newer.safetensors", "kind-used.safetensors"]
    cache.get("kind", "used", make)
    cache.get("kind", "last", make)
    assert [file.name for file in entries(cache)] == ["kind-last.safetensors", "kind-used.safetensors"]


def test_the_users_cache(tmp_path: Path) -> None:
    assert DataCache.of({"XDG_CACHE_HOME": "/there"}) == DataCache(
        folder=Path("/there/samestep/data"), limit=1024 * 10**6
    )
    assert DataCache.of({"HOME": "/me", "SAMESTEP_CACHE_MB": "7"}) == DataCache(
        folder=Path("/me/.cache/samestep/data"), limit=7 * 10**6
    )
    for wrong in ("-1", "much"):
        with pytest.raises(UserError, match="SAMESTEP_CACHE_MB"):
            DataCache.of({"SAMESTEP_CACHE_MB": wrong})
    off = DataCache.of({"XDG_CACHE_HOME": str(tmp_path), "SAMESTEP_CACHE_MB": "0"})
    ids_of(TEXTS, off)
    assert list(tmp_path.iterdir()) == []


PROGRAM = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
from samestep.data.cache import DataCache, digest
from test_data_cache import TEXTS, ids_of
sys.stdin.readline()  # both begin at once
ids, starts = ids_of(TEXTS, DataCache(folder=Path(sys.argv[1]), limit={LIMIT}))
print(digest(ids.tobytes(), starts.tobytes()))
"""


@pytest.mark.timeout(120)
def test_two_processes_at_once_get_the_same(cache: DataCache) -> None:
    several = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(cache.folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    try:
        found = [process.communicate("go\n", timeout=100)[0] for process in several]
    finally:
        for process in several:
            process.kill()
            process.wait()
    ids, starts = ids_of(TEXTS, DataCache(folder=cache.folder, limit=0))
    assert found == [digest(ids.tobytes(), starts.tobytes()) + "\n"] * 2
    assert [file.suffix for file in entries(cache)] == [".safetensors"] * 2


def test_a_text_that_is_one_long_word_makes_no_tokens_of_its_length() -> None:
    """Merging takes the square of a word's length: a megabyte of them would take hours."""
    texts = ["x" * 30_000, "two words", "y" * 999 + "-" + "z" * 999]
    trained = tokenizer.train_text(texts, 100)
    longest = max(map(len, trained.tokenizer.get_vocab()))
    assert 500 <= longest <= 1000
    assert trained.tokenizer.token_to_id("[UNK]") not in trained.encode(texts, 100_000)[0]
