"""Tokenizers: trained on texts, the same in every process that trains it, or loaded from files."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from samestep.errors import UserError

_PADDING, _UNKNOWN, _START, _END, _MASK = _SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
TRAINED_PADDING = 0  # the padding token's id in a trained tokenizer
_PADDING_NAMES = (_PADDING, "<pad>", "<|pad|>", "<|padding|>")
_END_NAMES = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", _END)
_LARGEST_ALPHABET = 6000  # the rest of a large vocabulary is for words


@dataclass(frozen=True, kw_only=True)
class TextTokenizer:
    """Texts to token ids."""

    tokenizer: Tokenizer
    padding: int  # the padding token's id

    @property
    def size(self) -> int:
        """Rows that an embedding needs."""
        return max(self.tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, texts: Sequence[str], max_length: int) -> list[NDArray[np.int32]]:
        """The ids of each text with its special tokens, cut to `max_length`."""
        self.tokenizer.no_padding()
        self.tokenizer.enable_truncation(max_length)
        return [np.array(found.ids, dtype=np.int32) for found in self.tokenizer.encode_batch_fast(list(texts))]


def train(texts: Sequence[str], vocabulary: int) -> TextTokenizer:
    """Train byte-pair merges on the texts; a function of texts and size alone.

    WordPiece would be the usual choice, but its trainer gives another vocabulary in each process, and so does
    any trainer that cuts the alphabet itself: it drops characters of equal frequency at random.
    """
    tokenizer = Tokenizer(models.BPE(unk_token=_UNKNOWN))
    tokenizer.normalizer = normalizers.BertNormalizer()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()  # pyright: ignore[reportAttributeAccessIssue]
    alphabet = _alphabet(map(tokenizer.normalizer.normalize_str, texts), min(_LARGEST_ALPHABET, vocabulary * 3 // 4))
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocabulary,
            min_frequency=2,
            special_tokens=list(_SPECIAL),
            initial_alphabet=alphabet,
            limit_alphabet=len(alphabet),
            show_progress=False,
        ),
    )
    start, end = (tokenizer.token_to_id(token) for token in (_START, _END))
    tokenizer.post_processor = processors.TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
        single=f"{_START} $A {_END}", special_tokens=[(_START, start), (_END, end)]
    )
    return TextTokenizer(tokenizer=tokenizer, padding=TRAINED_PADDING)


def load(path: Path, where: str) -> TextTokenizer:
    """Load a tokenizer.json, or the tokenizer in a folder. `where` is the key that names it, for messages.

    Raises UserError where there is none, it can't be loaded, or has no padding token.
    """
    parts = load_parts(path, where)
    if parts.padding is None:
        raise UserError(
            f"{where}: the tokenizer in {path} has no padding token; use one with {' or '.join(_PADDING_NAMES)}"
        )
    return TextTokenizer(tokenizer=parts.tokenizer, padding=parts.padding)


@dataclass(frozen=True, kw_only=True)
class TokenizerParts:
    """A tokenizer of a file or folder, and the ids of special tokens, None where it has no such token."""

    tokenizer: Tokenizer
    padding: int | None
    end: int | None  # of a document


def load_parts(path: Path, where: str) -> TokenizerParts:
    """Load a tokenizer.json, or the tokenizer in a folder. Raises UserError where there is none, or it can't be."""
    if not path.exists():
        raise UserError(f"{where}: no file or folder {path}")
    try:
        return _from_folder(path) if path.is_dir() else _from_file(path)
    except Exception as error:  # the libraries raise whatever a broken file makes them trip over
        reason = (str(error) or type(error).__name__).strip().partition("\n")[0]
        raise UserError(
            f"{where}: {path} can't be loaded as a tokenizer: {reason}; use a tokenizer.json, or a folder with one"
        ) from error


def _from_folder(path: Path) -> TokenizerParts:
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(path, local_files_only=True)
    return TokenizerParts(tokenizer=loaded.backend_tokenizer, padding=loaded.pad_token_id, end=loaded.eos_token_id)


def _from_file(path: Path) -> TokenizerParts:
    tokenizer = Tokenizer.from_file(str(path))
    padding = tokenizer.padding["pad_id"] if tokenizer.padding is not None else _first(tokenizer, _PADDING_NAMES)
    return TokenizerParts(tokenizer=tokenizer, padding=padding, end=_first(tokenizer, _END_NAMES))


def _first(tokenizer: Tokenizer, names: Sequence[str]) -> int | None:
    """The id of the first of these tokens that a tokenizer has."""
    return next((number for number in map(tokenizer.token_to_id, names) if number is not None), None)


def _alphabet(texts: Iterable[str], largest: int) -> list[str]:
    """The most frequent characters; of equally frequent ones those with the lower code point."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text)
    seen = (character for character in counts if not character.isspace())
    return sorted(seen, key=lambda character: (-counts[character], character))[:largest]
