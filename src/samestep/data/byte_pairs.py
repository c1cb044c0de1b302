"""Byte-level tokenizers for language models, which know every text; and text as one stream of token ids."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from samestep.data.tokenizer import load_parts

_SPECIAL = ("<pad>", "<|endoftext|>")
PADDING, END = 0, 1  # their ids in a trained tokenizer
SMALLEST = 256 + len(_SPECIAL)  # tokens: one a byte, and the special ones


@dataclass(frozen=True, kw_only=True)
class StreamTokenizer:
    """Texts to one stream of token ids."""

    tokenizer: Tokenizer
    padding: int | None  # the padding token's id
    end: int | None  # the id of the token behind each document

    @property
    def size(self) -> int:
        """Rows that an embedding needs."""
        return max(self.tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    def stream(self, documents: Sequence[str]) -> NDArray[np.int32]:
        """The ids of all documents, each with the end token behind it. (tokens,)"""
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        found = self.tokenizer.encode_batch_fast(list(documents), add_special_tokens=False)
        end = [] if self.end is None else [self.end]
        return np.concatenate([np.array([*encoding.ids, *end], dtype=np.int32) for encoding in found])


def train(documents: Sequence[str], vocabulary: int) -> StreamTokenizer:
    """Train byte-level byte-pair merges on the texts (Radford et al. 2019, section 2.2).

    A function of texts and size alone: the alphabet is given, so that the trainer chooses none by itself.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.train_from_iterator(
        documents,
        trainers.BpeTrainer(
            vocab_size=vocabulary,
            min_frequency=2,
            special_tokens=list(_SPECIAL),
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    return StreamTokenizer(tokenizer=tokenizer, padding=PADDING, end=END)


def load(path: Path, where: str) -> StreamTokenizer:
    """Load a tokenizer.json, or the tokenizer in a folder. `where` is the key that names it, for messages.

    Raises UserError where there is none, or it can't be loaded.
    """
    parts = load_parts(path, where)
    return StreamTokenizer(tokenizer=parts.tokenizer, padding=parts.padding, end=parts.end)
