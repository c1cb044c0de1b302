"""Text classification: an encoder that tells classes of texts apart."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from samestep import environment
from samestep.data import prepared
from samestep.data.cache import DataCache
from samestep.data.tokenizer import TRAINED_PADDING, TextTokenizer
from samestep.data.tokens import TokenisedTexts
from samestep.layout import ModelShape
from samestep.tasks import text_data, text_model, transformers_model
from samestep.tasks.base import Batch, Task
from samestep.tasks.prediction import Model, Prediction, ToPredict, lines_of, of_classes, predict_each
from samestep.tasks.text_data import Corpus, NumberedTexts, TextData
from samestep.tasks.text_model import TextModel
from samestep.tasks.transformers_model import Pretrained

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedConfig

    from samestep.tasks.metric import Metric


_UNKNOWN = -1  # the class of a text that is to be classified


class TextClassification(Task):
    """Classify texts. Everything is read and tokenised once, at the first use."""

    predicts_from = "a text file, of which each line is classified"

    def __init__(self, *, data: TextData, model: TextModel) -> None:
        self._data = data
        self._model = model

    def check(self) -> None:
        """Raise UserError for what is wrong with the data, or where model and data don't fit."""
        text_model.check(self._model, self._config, self._vocabulary, self._data.max_length)

    def model(self) -> "nn.Module":
        return text_model.build(self._model, self._config)

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

    def loss(self, output: Any, batch: Batch) -> "tuple[Tensor, int]":
        """Cross-entropy summed over the samples, and how many they are."""
        from torch.nn import functional as F

        return F.cross_entropy(_logits(output), batch.targets, reduction="sum"), len(batch.targets)

    def metrics(self) -> "Mapping[str, Metric]":
        """Accuracy over all samples, and by class; the rows of the confusion matrix sum to the support."""
        from samestep.tasks.classification import classification_metrics

        return classification_metrics(len(self._corpus.classes.names))

    def scores(self, output: Any, batch: Batch) -> "tuple[Tensor, Tensor]":
        """The probability of each class, (batch, classes), and the true classes."""
        return _logits(output).softmax(dim=-1).float(), batch.targets

    def class_names(self) -> Sequence[str]:
        return self._corpus.classes.names

    def predict(self, model: Model, wanted: ToPredict) -> Iterator[Prediction]:
        """The class of each held-out text, or of each line of a file."""
        if wanted.file is None:
            yield from super().predict(model, wanted)
            return
        texts = lines_of(wanted.file)
        numbered = NumberedTexts(texts=texts, classes=[_UNKNOWN] * len(texts))
        samples = self._tokenised(numbered)
        for text, found in zip(texts, predict_each(self, model, samples, wanted.batch), strict=True):
            yield {"text": text, **found}

    def predictions(self, output: Any, batch: Batch) -> Sequence[Prediction]:
        return of_classes(*self.scores(output, batch), self.class_names())

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

        folder = text_model.folder_of(self._model) if self._data.tokenizer is None else None
        tokenizer = transformers_model.tokenizer_of(
            self._tokenizer.tokenizer, folder, padding=self._padding, end=None, length=self._data.max_length
        )
        return Pretrained(auto_class=AutoModelForSequenceClassification, config=self._config, tokenizer=tokenizer)

    @cached_property
    def _corpus(self) -> Corpus:
        return text_data.read(self._data)

    @cached_property
    def _loaded_tokenizer(self) -> TextTokenizer | None:
        return text_data.loaded_tokenizer(self._data, text_model.folder_of(self._model))

    @cached_property
    def _tokenizer(self) -> TextTokenizer:
        return self._loaded_tokenizer or prepared.text_tokenizer(
            self._corpus.train.texts, self._data.vocabulary, self._cache
        )

    @property
    def _vocabulary(self) -> int:
        """Rows of the embedding. A trained tokenizer may have fewer tokens; so the size is known without it."""
        return self._loaded_tokenizer.size if self._loaded_tokenizer else self._data.vocabulary

    @property
    def _padding(self) -> int:
        return self._loaded_tokenizer.padding if self._loaded_tokenizer else TRAINED_PADDING

    @cached_property
    def _train_set(self) -> TokenisedTexts:
        return self._tokenised(self._corpus.train)

    @cached_property
    def _eval_set(self) -> TokenisedTexts | None:
        held_out = self._corpus.held_out
        return None if held_out is None else self._tokenised(held_out)

    def _tokenised(self, texts: NumberedTexts) -> TokenisedTexts:
        return text_data.tokenised(texts, self._tokenizer, self._data.max_length, self._cache)

    @property
    def _cache(self) -> DataCache:
        return DataCache.of(environment.snapshot())

    @cached_property
    def _config(self) -> "PreTrainedConfig":
        return text_model.configure(
            self._model,
            names=self._corpus.classes.names,
            vocabulary=self._vocabulary,
            padding=self._padding,
            length=self._data.max_length,
        )


def _logits(output: Any) -> "Tensor":
    """(batch, classes), in float32 at least; of a transformers output or a plain tensor."""
    logits = getattr(output, "logits", output)
    return logits.float() if logits.element_size() < 4 else logits
