"""Text classification: an encoder and a head assign a class to each text.

From the top: the model, its data (which texts, how they are split, how they become tokens), and the task.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass as plain_dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from annotated_types import Ge, Le, Lt
from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from samestep import environment
from samestep.data import cache, tokenizer
from samestep.data.cache import DataCache, sequences
from samestep.data.split import check_split, limited, split
from samestep.data.text import Classes, LabelledTexts, find_classes, read_source
from samestep.data.tokenizer import TEXT_PADDING, TextTokenizer, TokenisedTexts
from samestep.data.types import Batch
from samestep.errors import UserError
from samestep.field_types import STRICT, Layers, Real, Whole, Width
from samestep.layout import ModelShape
from samestep.limits import MOST, MOST_LENGTH, MOST_VOCABULARY
from samestep.tasks import transformers_model
from samestep.tasks.base import Classification, predict_each
from samestep.tasks.prediction import Model, Prediction, ToPredict, lines_of
from samestep.tasks.registry import check_heads, refuse_together
from samestep.tasks.transformers_model import Pretrained

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel


_KNOWN_TO_FIT = "bert, roberta, distilbert, electra or albert"

_DROPOUT_KEYS = (
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "dropout",
    "attention_dropout",
    "seq_classif_dropout",
    "classifier_dropout_prob",
    "summary_last_dropout",
)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TextModel:
    """An encoder with a classifier head: of these sizes with random weights, or loaded from a folder."""

    folder: str | None = None  # of a saved model, or package:NAME/FOLDER inside an installed package
    type: str = "bert"  # a model type of transformers
    layers: Layers = 4
    hidden: Width = 256
    heads: Width = 4
    feed_forward: Width | None = None  # None: 4 x hidden
    dropout: Annotated[Real, Ge(0), Lt(1)] = 0.1
    config: dict[str, Any] = Field(default_factory=dict)  # any further key of the model type's configuration

    @model_validator(mode="before")
    @classmethod
    def _sizes_come_with_a_folder(cls, values: Any) -> Any:
        sizes = ("type", "layers", "hidden", "heads", "feed_forward", "dropout")
        return refuse_together(values, "folder", sizes, "comes with the model in the folder; config changes it")

    @model_validator(mode="after")
    def _heads_divide_hidden(self) -> "TextModel":
        check_heads(self.hidden, self.heads)
        return self


def configure(model: TextModel, *, names: Sequence[str], vocabulary: int, padding: int, length: int) -> Any:
    """The configuration of a model that tells `names` apart, for ids below `vocabulary` and `length` tokens.

    Raises UserError for an unknown model type, a key or value that it doesn't take.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as CLASSIFIERS

    labels = {"id2label": dict(enumerate(names)), "label2id": {name: number for number, name in enumerate(names)}}
    folder = transformers_model.folder_of(model.folder)
    if folder is not None:
        return transformers_model.config_of_folder(folder, model.config, labels)
    plain = transformers_model.default_config(model.type, CLASSIFIERS, _KNOWN_TO_FIT)
    sizes = _sizes(model, plain)
    positions = getattr(plain, "max_position_embeddings", None)
    if positions is not None:
        # Some types count positions from the padding token's id + 1.
        sizes["max_position_embeddings"] = max(positions, length + padding + 1)
    others = [f"{name}_token_id" for name in ("bos", "eos", "cls", "sep")]
    unused = {key: None for key in others if isinstance(getattr(plain, key, None), int)}
    tokens = {"vocab_size": vocabulary, "pad_token_id": padding, **unused}
    transformers_model.check_keys(model.config, plain)
    return transformers_model.made(type(plain), {**sizes, **tokens, **labels, **model.config})


def build(model: TextModel, config: "PreTrainedConfig") -> "PreTrainedModel":
    """Build the model: random weights under torch's seed, or those of the folder and a new head under the seed.

    Raises UserError where the folder holds no weights for the encoder.
    """
    from transformers import AutoModelForSequenceClassification

    folder = transformers_model.folder_of(model.folder)
    if folder is None:
        return AutoModelForSequenceClassification.from_config(config)
    built, lacking = transformers_model.load(AutoModelForSequenceClassification, folder, config)
    # A head is new where the classes are others; an encoder is not.
    encoder = [key for key in lacking if key.startswith(f"{built.base_model_prefix}.") and ".pooler." not in key]
    if encoder:
        raise UserError(
            f"{transformers_model.FOLDER}: {folder} lacks fitting weights for {len(encoder)} parameters of the "
            f"encoder, such as {encoder[0]}; use a folder written by save_pretrained, and no config that "
            "changes sizes"
        )
    return built


def check(model: TextModel, config: "PreTrainedConfig", vocabulary: int, length: int) -> None:
    """Raise UserError where the model can't be built, or is too small for the token ids or the length."""
    built = transformers_model.trial(
        partial(build, model, config),
        name=model.folder or model.type,
        is_new=model.folder is None,
        kind="a text classifier",
        known_to_fit=_KNOWN_TO_FIT,
    )
    transformers_model.check_size(built, config.vocab_size, vocabulary, length, "recipe.data.max_length")


def _sizes(model: TextModel, plain: "PreTrainedConfig") -> dict[str, Any]:
    """The sizes under the keys that this model type has for them."""
    wanted_sizes = {
        "layers": model.layers,
        "hidden": model.hidden,
        "heads": model.heads,
        "feed_forward": model.feed_forward or 4 * model.hidden,
    }
    dropout = {key: model.dropout for key in _DROPOUT_KEYS if hasattr(plain, key)}
    return dropout | transformers_model.sized(plain, wanted_sizes, _KNOWN_TO_FIT)


_SOURCE = "recipe.data.source"
_EVAL_SOURCE = "recipe.data.eval_source"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TextData:
    """Labelled texts, how they are split, and how they become tokens.

    A path may be "package:NAME/FILE", a file inside an installed package.
    """

    source: str = "reviews"  # or another of SOURCES, or a file with a suffix of READERS (data/text.py)
    eval_source: str | None = None  # held-out texts in a source of their own
    held_out: Annotated[Real, Ge(0), Lt(1)] = 0.1  # fraction of `source`; 0: no evaluation
    max_length: Annotated[Whole, Ge(3), Le(MOST_LENGTH)] = 128  # tokens; longer texts are cut
    vocabulary: Annotated[Whole, Ge(32), Le(MOST_VOCABULARY)] = 8000  # of a tokenizer trained on the training texts
    tokenizer: str | None = None  # a tokenizer.json or a folder; None: the model folder's, or else a trained one
    labels: tuple[str, ...] | None = None  # the classes in their order; None: from the texts' labels
    limit: Annotated[Whole, Ge(2), Le(MOST)] | None = None  # most samples of a source, for quick tests

    @model_validator(mode="before")
    @classmethod
    def _one_way(cls, values: Any) -> Any:
        refuse_together(values, "eval_source", ["held_out"], "is for held-out texts taken from source")
        return refuse_together(values, "tokenizer", ["vocabulary"], "is for a tokenizer trained on the texts")

    @model_validator(mode="after")
    def _labels_are_classes(self) -> "TextData":
        """At least two names, each once."""
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
    source = read_source(data.source, _SOURCE)
    classes = find_classes(source, data.labels, "recipe.data.labels")
    texts = _numbered(source, classes, data.limit)
    if data.eval_source is not None:
        held_out = _numbered(read_source(data.eval_source, _EVAL_SOURCE), classes, data.limit)
        return Corpus(classes=classes, train=texts, held_out=held_out)
    if data.held_out == 0:
        return Corpus(classes=classes, train=texts, held_out=None)
    train, held = split(texts.texts, data.held_out)
    check_split(len(train), len(held), data.held_out, "recipe.data.held_out")
    return Corpus(classes=classes, train=texts.pick(train), held_out=texts.pick(held))


def tokenised(
    texts: NumberedTexts, with_tokenizer: TextTokenizer, max_length: int, cache: DataCache
) -> TokenisedTexts:
    """Tokenise all texts. Raises UserError for a text without any token."""
    ids, starts, checksum = sequences(texts.texts, with_tokenizer, max_length, cache)
    empty = np.flatnonzero(np.diff(starts) == 0)
    if len(empty):
        text = texts.texts[int(empty[0])]
        where = transformers_model.TOKENIZER
        raise UserError(f'{where}: it gives no tokens for the text "{text[:40]}"; remove that text')
    return TokenisedTexts(ids, starts, texts.classes, checksum=checksum)


def _numbered(source: LabelledTexts, classes: Classes, limit: int | None) -> NumberedTexts:
    whole = NumberedTexts(texts=source.texts, classes=classes.numbers(source))
    return whole.pick(limited(source.texts, limit))


_UNKNOWN = -1  # the class of a text that is to be classified


class TextClassification(Classification):
    """Classify texts. Everything is read and tokenised once, at the first use."""

    predicts_from = "a text file, of which each line is classified"

    def __init__(self, *, data: TextData, model: TextModel) -> None:
        self._data = data
        self._model = model

    def check(self) -> None:
        """Raise UserError for what is wrong with the data, or where model and data don't fit."""
        check(self._model, self._config, self._vocabulary, self._data.max_length)

    def model(self) -> "nn.Module":
        return build(self._model, self._config)

    def train_set(self) -> TokenisedTexts:
        return self._train_set

    def eval_set(self) -> TokenisedTexts | None:
        return self._eval_set

    def sample_lengths(self) -> Sequence[int]:
        return self._train_set.lengths.tolist()

    def collate(self, samples: Sequence[tuple[Any, int]]) -> Batch:
        """Pad to the longest of these samples; the mask keeps padding out of the result."""
        import torch

        longest = max(len(ids) for ids, _ in samples)
        padded = np.full((len(samples), longest), self._padding, dtype=np.int64)
        mask = np.zeros_like(padded)
        for row, (ids, _) in enumerate(samples):
            padded[row, : len(ids)] = ids
            mask[row, : len(ids)] = 1
        inputs = {
            "input_ids": torch.from_numpy(padded),  # (batch, longest)
            "attention_mask": torch.from_numpy(mask),  # (batch, longest)
        }
        return Batch(inputs, torch.tensor([number for _, number in samples]))

    def class_names(self) -> Sequence[str]:
        return self._corpus.classes.names

    def predict(self, model: Model, request: ToPredict) -> Iterator[Prediction]:
        """The class of each held-out text, or of each line of a file."""
        if request.file is None:
            yield from super().predict(model, request)
            return
        texts = lines_of(request.file)
        numbered = NumberedTexts(texts=texts, classes=[_UNKNOWN] * len(texts))
        samples = self._tokenised(numbered)
        for text, prediction in zip(texts, predict_each(self, model, samples, request.batch), strict=True):
            yield {"text": text, **prediction}

    def shape(self) -> ModelShape:
        """Heads and layers of the model, and the longest sequence that the data gives it."""
        config = self._config
        return ModelShape(
            heads=config.num_attention_heads,
            key_value_heads=getattr(config, "num_key_value_heads", None),
            layers=config.num_hidden_layers,
            sequence_length=self._data.max_length,
        )

    def pretrained(self) -> Pretrained:
        from transformers import AutoModelForSequenceClassification

        folder = transformers_model.folder_of(self._model.folder) if self._data.tokenizer is None else None
        tokenizer = transformers_model.tokenizer_of(
            self._tokenizer.tokenizer, folder, padding=self._padding, end=None, length=self._data.max_length
        )
        build = AutoModelForSequenceClassification.from_config
        return Pretrained(build=build, config=self._config, processors=[tokenizer])

    @cached_property
    def _corpus(self) -> Corpus:
        return read(self._data)

    @cached_property
    def _loaded_tokenizer(self) -> TextTokenizer | None:
        return transformers_model.loaded_tokenizer(tokenizer.load_text, self._data.tokenizer, self._model.folder)

    @cached_property
    def _tokenizer(self) -> TextTokenizer:
        return self._loaded_tokenizer or cache.text_tokenizer(
            self._corpus.train.texts, self._data.vocabulary, self._cache
        )

    @property
    def _vocabulary(self) -> int:
        """Rows of the embedding. A trained tokenizer may have fewer tokens; so the size is known without it."""
        return self._loaded_tokenizer.size if self._loaded_tokenizer else self._data.vocabulary

    @property
    def _padding(self) -> int:
        return self._loaded_tokenizer.padding if self._loaded_tokenizer else TEXT_PADDING

    @cached_property
    def _train_set(self) -> TokenisedTexts:
        return self._tokenised(self._corpus.train)

    @cached_property
    def _eval_set(self) -> TokenisedTexts | None:
        held_out = self._corpus.held_out
        return None if held_out is None else self._tokenised(held_out)

    def _tokenised(self, texts: NumberedTexts) -> TokenisedTexts:
        return tokenised(texts, self._tokenizer, self._data.max_length, self._cache)

    @property
    def _cache(self) -> DataCache:
        return DataCache.of(environment.snapshot())

    @cached_property
    def _config(self) -> "PreTrainedConfig":
        return configure(
            self._model,
            names=self._corpus.classes.names,
            vocabulary=self._vocabulary,
            padding=self._padding,
            length=self._data.max_length,
        )
