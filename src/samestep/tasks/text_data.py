"""The data of a text classification: which texts, how they are split, and how they become tokens."""

from collections.abc import Sequence
from dataclasses import dataclass as plain_dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge, Lt
from pydantic import model_validator
from pydantic.dataclasses import dataclass

from samestep.data import prepared, sources, tokenizer
from samestep.data.cache import DataCache
from samestep.data.installed import locate
from samestep.data.labels import Classes, find_classes
from samestep.data.split import check_split, limited, split
from samestep.data.texts import LabelledTexts
from samestep.data.tokenizer import TextTokenizer
from samestep.data.tokens import TokenisedTexts
from samestep.errors import UserError
from samestep.recipe import STRICT
from samestep.tasks.sections import refuse_together

_SOURCE = "recipe.data.source"
_EVAL_SOURCE = "recipe.data.eval_source"
_TOKENIZER = "recipe.data.tokenizer"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TextData:
    """Labelled texts, how they are split, and how they become tokens.

    A path may be "package:NAME/FILE", a file inside an installed package.
    """

    source: str = "reviews"  # or debian-packages, or a .jsonl or .csv file with the columns text and label
    eval_source: str | None = None  # held-out texts in a source of their own
    held_out: Annotated[float, Ge(0), Lt(1)] = 0.1  # fraction of `source`; 0: no evaluation
    max_length: Annotated[int, Ge(3)] = 128  # tokens; longer texts are cut
    vocabulary: Annotated[int, Ge(32)] = 8000  # of a tokenizer trained on the training texts
    tokenizer: str | None = None  # a tokenizer.json or a folder; None: the model folder's, or else a trained one
    labels: tuple[str, ...] | None = None  # the classes in their order; None: from the texts' labels
    limit: Annotated[int, Ge(2)] | None = None  # most samples of a source, for quick tests

    @model_validator(mode="before")
    @classmethod
    def _one_way(cls, given: Any) -> Any:
        refuse_together(given, "eval_source", ["held_out"], "is for held-out texts taken from source")
        return refuse_together(given, "tokenizer", ["vocabulary"], "is for a tokenizer trained on the texts")

    @model_validator(mode="after")
    def _labels_are_classes(self) -> "TextData":
        names = self.labels or ()
        if self.labels is not None and len(names) < 2:
            raise ValueError(f"labels has {len(names)} of the two or more classes that are needed")
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f'labels has "{name}" more than once; name each class once')
        return self


@plain_dataclass(frozen=True, kw_only=True)
class NumberedTexts:
    """Texts and their class numbers."""

    texts: Sequence[str]
    classes: Sequence[int]

    def pick(self, indices: Sequence[int]) -> "NumberedTexts":
        return NumberedTexts(
            texts=[self.texts[index] for index in indices], classes=[self.classes[index] for index in indices]
        )


@plain_dataclass(frozen=True, kw_only=True)
class Corpus:
    """Texts to train on and held-out ones."""

    classes: Classes
    train: NumberedTexts
    held_out: NumberedTexts | None


def read(data: TextData) -> Corpus:
    """Read and split the texts, and number their classes.

    Raises UserError for a source that can't be read, for a label that is none of the classes, for fewer than
    two classes, and where a side of the split is empty.
    """
    source = sources.read(data.source, _SOURCE)
    classes = find_classes(source, data.labels, "recipe.data.labels")
    texts = _numbered(source, classes, data.limit)
    if data.eval_source is not None:
        held_out = _numbered(sources.read(data.eval_source, _EVAL_SOURCE), classes, data.limit)
        return Corpus(classes=classes, train=texts, held_out=held_out)
    if data.held_out == 0:
        return Corpus(classes=classes, train=texts, held_out=None)
    train, held = split(texts.texts, data.held_out)
    check_split(len(train), len(held), data.held_out, "recipe.data.held_out")
    return Corpus(classes=classes, train=texts.pick(train), held_out=texts.pick(held))


def loaded_tokenizer(data: TextData, model_folder: Path | None) -> TextTokenizer | None:
    """The tokenizer of a file or folder; None where one is to be trained.

    Raises UserError where it can't be loaded.
    """
    if data.tokenizer is not None:
        return tokenizer.load(locate(data.tokenizer, _TOKENIZER), _TOKENIZER)
    if model_folder is not None:
        # The weights of a pretrained model mean nothing under the ids of another tokenizer.
        return tokenizer.load(model_folder, f"{_TOKENIZER} is missing, and recipe.model.folder has no usable one")
    return None


def tokenised(
    texts: NumberedTexts, with_tokenizer: TextTokenizer, max_length: int, cache: DataCache
) -> TokenisedTexts:
    """Tokenise all texts. Raises UserError for a text without any token."""
    ids, starts = prepared.sequences(texts.texts, with_tokenizer, max_length, cache)
    empty = np.flatnonzero(np.diff(starts) == 0)
    if len(empty):
        text = texts.texts[int(empty[0])]
        raise UserError(f'{_TOKENIZER}: it gives no tokens for the text "{text[:40]}"; remove that text')
    return TokenisedTexts(ids, starts, texts.classes)


def _numbered(source: LabelledTexts, classes: Classes, limit: int | None) -> NumberedTexts:
    whole = NumberedTexts(texts=source.texts, classes=classes.numbers(source))
    return whole.pick(limited(source.texts, limit))
