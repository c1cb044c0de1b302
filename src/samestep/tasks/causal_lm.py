"""Language modelling: a decoder learns to predict each token from those before it."""

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from samestep import environment
from samestep.data import byte_pairs, prepared
from samestep.data.blocks import IGNORED, TokenBlocks
from samestep.data.byte_pairs import StreamTokenizer
from samestep.data.cache import DataCache
from samestep.data.running_text import RunningText
from samestep.errors import UserError
from samestep.layout import ModelShape
from samestep.tasks import decoder_model, language_data, transformers_model
from samestep.tasks.base import Batch, Task, Work
from samestep.tasks.decoder_model import DecoderModel
from samestep.tasks.language_data import LanguageData
from samestep.tasks.prediction import Model, Prediction, ToPredict, lines_of, predict_each
from samestep.tasks.transformers_model import Pretrained

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedConfig

    from samestep.tasks.metric import Metric


class CausalLM(Task):
    """Predict the next token. Everything is read and tokenised once, at the first use."""

    predicts_from = "a text file, with a text in each line"
    writes_text = True

    def __init__(self, *, data: LanguageData, model: DecoderModel) -> None:
        self._data = data
        self._model = model

    def check(self) -> None:
        """Raise UserError for what is wrong with the data, or where model and data don't fit."""
        if not len(self.train_set()):
            raise UserError(f"{self._data.source} has fewer than two tokens to train on; a longer text would do")
        decoder_model.check(self._model, self._config, self._vocabulary, self._data.length)

    def model(self) -> "nn.Module":
        return decoder_model.build(self._model, self._config)

    def train_set(self) -> TokenBlocks:
        return self._train_set

    def eval_set(self) -> TokenBlocks | None:
        return self._eval_set

    def collate(self, samples: Sequence[tuple[Any, Any]]) -> Batch:
        """All samples have the same length. Padding stands at their end, where nothing looks back at it."""
        import torch

        inputs, targets = (torch.from_numpy(np.stack(part)) for part in zip(*samples, strict=True))
        return Batch({"input_ids": inputs}, targets)  # both [batch, length]

    def loss(self, output: Any, batch: Batch) -> "tuple[Tensor, Tensor]":
        """Cross-entropy summed over the tokens that are not padding, and how many they are."""
        return _cross_entropy(output, batch.targets, "sum"), (batch.targets != IGNORED).sum()

    def metrics(self) -> "Mapping[str, Metric]":
        """Perplexity, and the mean loss of a token in nats."""
        from samestep.tasks.language_metrics import language_metrics

        return language_metrics()

    def scores(self, output: Any, batch: Batch) -> "tuple[Tensor, Tensor]":
        """Each sample's summed loss and its number of tokens: what ranks exchange is not the logits."""
        losses = _cross_entropy(output, batch.targets, "none").reshape(batch.targets.shape)  # [batch, length]
        return losses.double().sum(dim=1), (batch.targets != IGNORED).sum(dim=1)

    def predict(self, model: Model, wanted: ToPredict) -> Iterator[Prediction]:
        """The loss of each held-out block, or of each line of a file; and how the model goes on with the line."""
        if wanted.file is None:
            yield from super().predict(model, wanted)
            return
        for text in lines_of(wanted.file):
            found = {"text": text, **self._loss_of(text, model, wanted.batch)}
            if wanted.new_tokens:
                found["continuation"] = self._continued(text, model, wanted.new_tokens)
            yield found

    def predictions(self, output: Any, batch: Batch) -> Sequence[Prediction]:
        """The mean loss of each block's tokens in nats, and how many they are."""
        sums, counts = self.scores(output, batch)
        return [_mean(total, count) for total, count in zip(sums.tolist(), counts.tolist(), strict=True)]

    def _loss_of(self, text: str, model: Model, batch: int) -> Prediction:
        """The mean loss over a text's tokens but the first, in blocks as in training."""
        parts = list(predict_each(self, model, self._blocks([text]), batch)) if text else []
        counts = [part["tokens"] for part in parts]
        sums = [part["loss"] * part["tokens"] for part in parts if part["tokens"]]
        return _mean(sum(sums), sum(counts))

    def _continued(self, text: str, model: Model, most: int) -> str:
        """The likeliest token behind the text, and behind that, until the end of a document or `most` of them."""
        import torch

        ids = self._tokenizer.tokenizer.encode(text, add_special_tokens=False).ids
        known = ids or ([] if self._end is None else [self._end])  # a document stands behind another's end
        written: list[int] = []
        while known and len(written) < most:
            seen = [*known, *written][-self._data.length :]
            logits = getattr(output := model({"input_ids": torch.tensor([seen])}), "logits", output)
            following = int(logits[0, -1].argmax())
            if following == self._end:
                break
            written.append(following)
        return self._tokenizer.tokenizer.decode(written)

    def shape(self) -> ModelShape:
        config = self._config
        return ModelShape(
            heads=config.num_attention_heads,
            key_value_heads=getattr(config, "num_key_value_heads", None),
            layers=config.num_hidden_layers,
            sequence_length=self._data.length,
        )

    def work(self) -> Work:
        length = self._data.length
        return Work(tokens=length, flops=decoder_model.flops(self._model, self._config, length))

    def pretrained(self) -> Pretrained:
        from transformers import AutoModelForCausalLM

        config = deepcopy(self._config)
        config.use_cache = True  # for writing text, for which the folder is meant
        folder = decoder_model.folder_of(self._model) if self._data.tokenizer is None else None
        tokenizer = transformers_model.tokenizer_of(
            self._tokenizer.tokenizer, folder, padding=self._padding, end=self._end, length=self._data.length
        )
        return Pretrained(auto_class=AutoModelForCausalLM, config=config, tokenizer=tokenizer)

    @cached_property
    def _text(self) -> RunningText:
        return language_data.read(self._data)

    @cached_property
    def _loaded_tokenizer(self) -> StreamTokenizer | None:
        return language_data.loaded_tokenizer(self._data, decoder_model.folder_of(self._model))

    @cached_property
    def _tokenizer(self) -> StreamTokenizer:
        return self._loaded_tokenizer or prepared.stream_tokenizer(
            self._text.train, self._data.vocabulary, self._cache
        )

    @property
    def _vocabulary(self) -> int:
        """Rows of the embedding that ids need. A trained tokenizer may have fewer: the text may be too short."""
        loaded = self._loaded_tokenizer
        if loaded is None:
            return self._data.vocabulary
        return max(loaded.size, self._padding + 1)

    @cached_property
    def _padding(self) -> int:
        """The padding token's id; where a tokenizer has none, a new one, or in a model of its own the end's.

        Any id would do: what stands at padding is never looked back at, and its targets are ignored.
        """
        loaded = self._loaded_tokenizer
        if loaded is None:
            return byte_pairs.PADDING
        if loaded.padding is not None:
            return loaded.padding
        return loaded.size if self._model.folder is None else loaded.end or 0

    @property
    def _end(self) -> int | None:
        return byte_pairs.END if self._loaded_tokenizer is None else self._loaded_tokenizer.end

    @cached_property
    def _train_set(self) -> TokenBlocks:
        return self._blocks(self._text.train)

    @cached_property
    def _eval_set(self) -> TokenBlocks | None:
        return self._blocks(self._text.held_out) if self._text.held_out else None

    def _blocks(self, documents: Sequence[str]) -> TokenBlocks:
        stream = prepared.stream(documents, self._tokenizer, self._cache)
        return TokenBlocks(stream, length=self._data.length, padding=self._padding)

    @property
    def _cache(self) -> DataCache:
        return DataCache.of(environment.snapshot())

    @cached_property
    def _config(self) -> "PreTrainedConfig":
        return decoder_model.configure(
            self._model, vocabulary=self._vocabulary, end=self._end, length=self._data.length
        )


def _mean(total: float, count: int) -> Prediction:
    return {"loss": total / count if count else None, "tokens": count}


def _cross_entropy(output: Any, targets: "Tensor", reduction: str) -> "Tensor":
    """Cross-entropy of next tokens, in float32 at least; of a transformers output or plain logits."""
    from torch.nn import functional as F

    logits = getattr(output, "logits", output)  # [batch, length, vocabulary]
    logits = logits.reshape(-1, logits.shape[-1])
    wide = logits.float() if logits.element_size() < 4 else logits
    return F.cross_entropy(wide, targets.reshape(-1), reduction=reduction, ignore_index=IGNORED)
