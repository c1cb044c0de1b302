"""Tokenizers, and data sets of token ids.

A classifier takes each text by itself (`TextTokenizer`, `TokenisedTexts`); a language model takes all text as one
stream of ids, cut into blocks (`StreamTokenizer`, `TokenBlocks`). Either tokenizer is trained on the training texts,
to the same result in every process that trains it, or loaded from files.
"""

import hashlib
import pickle
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from samestep.data.types import WholeDigest
from samestep.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_PADDING, _UNKNOWN, _START, _END, _MASK = _TEXT_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")

TEXT_PADDING = 0  # the padding token's id in a tokenizer that train_text made

_PADDING_NAMES = (_PADDING, "<pad>", "<|pad|>", "<|padding|>")

_END_NAMES = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", _END)

_LONGEST_WORD = 1000
_WORD, _PIECE = re.compile(r"\w+"), re.compile(rf"\w{{{_LONGEST_WORD}}}(?=\w)")

_LARGEST_ALPHABET = 6000  # the rest of a large vocabulary is for words


@dataclass(frozen=True, kw_only=True)
class TextTokenizer:
    """Turns each text into token ids of its own, with special tokens around them: for classifiers."""

    tokenizer: "Tokenizer"
    padding: int  # the padding token's id

    @property
    def size(self) -> int:
        """Rows that an embedding needs."""
        return max(self.tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, texts: Sequence[str], max_length: int) -> list[NDArray[np.int32]]:
        """The ids of each text with its special tokens, cut to `max_length`: [tokens of the text] each."""
        self.tokenizer.no_padding()
        self.tokenizer.enable_truncation(max_length)
        return [np.array(encoding.ids, dtype=np.int32) for encoding in self.tokenizer.encode_batch_fast(list(texts))]


def train_text(texts: Sequence[str], vocabulary: int) -> TextTokenizer:
    """Train byte-pair merges on the texts; the result depends on the texts and the size alone.

    WordPiece is the usual choice for encoders, but its trainer gives another vocabulary in each process. So does any
    trainer that chooses the alphabet itself: it drops characters of equal frequency at random.
    """
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE(unk_token=_UNKNOWN))
    tokenizer.normalizer = normalizers.BertNormalizer()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()  # pyright: ignore[reportAttributeAccessIssue]
    alphabet = _alphabet(map(tokenizer.normalizer.normalize_str, texts), min(_LARGEST_ALPHABET, vocabulary * 3 // 4))
    tokenizer.train_from_iterator(
        _cut(texts),
        trainers.BpeTrainer(
            vocab_size=vocabulary,
            min_frequency=2,
            special_tokens=list(_TEXT_SPECIAL),
            initial_alphabet=alphabet,
            limit_alphabet=len(alphabet),
            show_progress=False,
        ),
    )
    start, end = (tokenizer.token_to_id(token) for token in (_START, _END))
    tokenizer.post_processor = processors.TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
        single=f"{_START} $A {_END}", special_tokens=[(_START, start), (_END, end)]
    )
    return TextTokenizer(tokenizer=tokenizer, padding=TEXT_PADDING)


def _cut(texts: Iterable[str]) -> Iterator[str]:
    """The texts, with a space after each 1,000 characters of a longer word: merging takes the square of a length.

    A megabyte without a space or a sign, as of hexadecimal numbers, would take hours.
    """
    for text in texts:
        is_long = len(text) > _LONGEST_WORD and len(max(text.split(), key=len, default="")) > _LONGEST_WORD
        yield _WORD.sub(lambda word: _PIECE.sub(r"\g<0> ", word[0]), text) if is_long else text


def _alphabet(texts: Iterable[str], largest: int) -> list[str]:
    """The most frequent characters; of equally frequent ones those with the lower code point."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text)
    seen = (character for character in counts if not character.isspace())
    return sorted(seen, key=lambda character: (-counts[character], character))[:largest]


def load_text(path: Path, where: str) -> TextTokenizer:
    """Load a tokenizer.json, or the tokenizer in a folder. `where` is the key that names it, for messages.

    Raises UserError where there is none, it can't be loaded, or has no padding token.
    """
    parts = _load_parts(path, where)
    if parts.padding is None:
        raise UserError(
            f"{where}: the tokenizer in {path} has no padding token; use one with {' or '.join(_PADDING_NAMES)}"
        )
    return TextTokenizer(tokenizer=parts.tokenizer, padding=parts.padding)


_STREAM_SPECIAL = ("<pad>", "<|endoftext|>")

STREAM_PADDING, STREAM_END = 0, 1  # their ids in a tokenizer that train_stream made

SMALLEST_STREAM = 256 + len(_STREAM_SPECIAL)  # tokens: one a byte, and the special ones


@dataclass(frozen=True, kw_only=True)
class StreamTokenizer:
    """Turns texts into one stream of token ids, any bytes included: for language models."""

    tokenizer: "Tokenizer"
    padding: int | None  # the padding token's id
    end: int | None  # the id of the token behind each document

    @property
    def size(self) -> int:
        """Rows that an embedding needs."""
        return max(self.tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    def stream(self, documents: Sequence[str]) -> NDArray[np.int32]:
        """The ids of all documents, each with the end token behind it: [tokens]."""
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        encodings = self.tokenizer.encode_batch_fast(list(documents), add_special_tokens=False)
        end = [] if self.end is None else [self.end]
        return np.concatenate([np.array([*encoding.ids, *end], dtype=np.int32) for encoding in encodings])


def train_stream(documents: Sequence[str], vocabulary: int) -> StreamTokenizer:
    """Train byte-level byte-pair merges on the texts (Radford et al. 2019, section 2.2).

    The result depends on the texts and the size alone: the alphabet is given, so that the trainer chooses none.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.train_from_iterator(
        _cut(documents),
        trainers.BpeTrainer(
            vocab_size=vocabulary,
            min_frequency=2,
            special_tokens=list(_STREAM_SPECIAL),
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    return StreamTokenizer(tokenizer=tokenizer, padding=STREAM_PADDING, end=STREAM_END)


def load_stream(path: Path, where: str) -> StreamTokenizer:
    """Load a tokenizer.json, or the tokenizer in a folder. `where` is the key that names it, for messages.

    Raises UserError where there is none, or it can't be loaded.
    """
    parts = _load_parts(path, where)
    return StreamTokenizer(tokenizer=parts.tokenizer, padding=parts.padding, end=parts.end)


@dataclass(frozen=True, kw_only=True)
class _Parts:
    """A loaded tokenizer, and the ids of its padding and end tokens, None where it has none."""

    tokenizer: "Tokenizer"
    padding: int | None
    end: int | None  # of a document


def _load_parts(path: Path, where: str) -> _Parts:
    """Load a tokenizer.json, or the tokenizer in a folder. Raises UserError where there is none, or it can't be."""
    if not path.exists():
        raise UserError(f"{where}: no file or folder {path}")
    try:
        return _from_folder(path) if path.is_dir() else _from_file(path)
    except Exception as error:  # the libraries raise whatever a broken file makes them trip over
        reason = why_not_loaded(error)
        raise UserError(
            f"{where}: {path} can't be loaded as a tokenizer: {reason}; use a tokenizer.json, or a folder with one"
        ) from error


def why_not_loaded(error: Exception) -> str:
    """Why transformers can't load from a folder, in one clause."""
    if "trust_remote_code" in str(error):
        return "it needs Python code that comes with it, which is not run"
    if isinstance(error, pickle.UnpicklingError):
        return "its weights are a pickle that names more than tensors, and could run code"
    return (str(error) or type(error).__name__).strip().partition("\n")[0]


def _from_folder(path: Path) -> _Parts:
    """The tokenizer of a folder as transformers loads it, with the special tokens that its configuration names."""
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    return _Parts(tokenizer=loaded.backend_tokenizer, padding=loaded.pad_token_id, end=loaded.eos_token_id)


def _from_file(path: Path) -> _Parts:
    """Load a tokenizer.json; its padding token is the configured one, or one with a usual name."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    padding = tokenizer.padding["pad_id"] if tokenizer.padding is not None else _first(tokenizer, _PADDING_NAMES)
    return _Parts(tokenizer=tokenizer, padding=padding, end=_first(tokenizer, _END_NAMES))


def _first(tokenizer: "Tokenizer", names: Sequence[str]) -> int | None:
    """Return the id of the first of these tokens that the tokenizer has; None if it has none."""
    return next((number for number in map(tokenizer.token_to_id, names) if number is not None), None)


IGNORED = -100  # a target that the loss passes over, as torch's cross_entropy has it


class TokenBlocks(WholeDigest):
    """Blocks of equal length cut from a stream of tokens: samples are (inputs, targets), both [length].

    Target i is the token after input i. The last block is padded; targets at padding are ignored.

    Block i has tokens i * length to (i + 1) * length of the stream; its last one is a target only, and the first
    input of block i + 1.
    """

    def __init__(self, stream: NDArray[np.int32], *, length: int, padding: int, checksum: str) -> None:
        """`checksum`: that of the stream, [tokens]."""
        self._stream = stream
        self._checksum = checksum
        self._length = length
        self._padding = padding

    def digest(self) -> str:
        return f"{self._checksum} {self._length} {self._padding}"

    def __len__(self) -> int:
        return -(-max(0, len(self._stream) - 1) // self._length)

    def __getitem__(self, index: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Inputs [length] and targets [length], the next token of each; the last block is padded."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        start = index % len(self) * self._length
        taken = self._stream[start : start + self._length + 1]  # neighbours share one token
        inputs = np.full(self._length, self._padding, dtype=np.int64)
        targets = np.full(self._length, IGNORED, dtype=np.int64)
        inputs[: len(taken) - 1] = taken[:-1]
        targets[: len(taken) - 1] = taken[1:]
        return inputs, targets


class TokenisedTexts(WholeDigest):
    """Labelled texts as ids: samples are (token ids, class number), the ids [tokens of the text]."""

    def __init__(
        self, ids: NDArray[np.int32], starts: NDArray[np.int64], classes: Sequence[int], *, checksum: str
    ) -> None:
        """`ids` are those of all texts, [tokens]; text i is ids[starts[i] : starts[i + 1]].

        `checksum`: that of both arrays.
        """
        self._checksum = checksum
        self._ids = ids
        self._starts = starts  # [samples + 1]
        self._classes = np.array(classes, dtype=np.int64)  # [samples]

    def digest(self) -> str:
        return f"{self._checksum} {hashlib.sha256(self._classes.astype('<i8').tobytes()).hexdigest()[:32]}"

    @property
    def lengths(self) -> NDArray[np.int64]:
        """The number of tokens of each sample, [samples]."""
        return np.diff(self._starts)

    def __len__(self) -> int:
        return len(self._classes)

    def __getitem__(self, index: int) -> tuple[NDArray[np.int32], int]:
        """Token ids [tokens] and the class."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        index %= len(self)
        return self._ids[self._starts[index] : self._starts[index + 1]], int(self._classes[index])
