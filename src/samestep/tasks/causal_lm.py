"""Language modelling: a decoder learns to predict each token from the tokens before it.

From the top: the model, its data (which texts, what is held out, blocks of tokens), its metrics, and the task.
"""

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from functools import cached_property, partial
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from annotated_types import Ge, Le, Lt
from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass
from torch import Tensor

from samestep import environment
from samestep.data import cache, corpus, tokenizer
from samestep.data.cache import DataCache
from samestep.data.corpus import RunningText
from samestep.data.tokenizer import IGNORED, StreamTokenizer, TokenBlocks
from samestep.data.types import Batch
from samestep.errors import UserError
from samestep.field_types import STRICT, Layers, Real, Whole, Width
from samestep.layout import ModelShape
from samestep.limits import MOST_LENGTH, MOST_VOCABULARY
from samestep.tasks import transformers_model
from samestep.tasks.base import Task, Work, predict_each
from samestep.tasks.metrics import Metric, Ratio
from samestep.tasks.prediction import Model, Prediction, ToPredict, lines_of
from samestep.tasks.registry import check_heads, refuse_together
from samestep.tasks.transformers_model import Pretrained

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedConfig, PreTrainedModel

    from samestep.tasks.metrics import Metric

_KNOWN_TO_FIT = "llama, mistral, qwen2, qwen3, gpt2 or gpt_neox"
_DROPOUT_KEYS = ("attention_dropout", "hidden_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop")
_ROWS = 8  # rows of the vocabulary come in multiples of it, which matrix units like, and ranks can share

# Keys and values of earlier tokens are kept for writing text, one token after another. And padding stands behind
# all tokens of a block, where nothing looks back at it: it needs no mask, for the lack of which models warn.
_FOR_TRAINING = {"use_cache": False, "pad_token_id": None}


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DecoderModel:
    """A decoder: of these sizes with random weights, or loaded from a folder."""

    folder: str | None = None  # of a saved model, or package:NAME/FOLDER inside an installed package
    type: str = "llama"  # a model type of transformers
    layers: Layers = 4
    hidden: Width = 256
    heads: Width = 4
    key_value_heads: Width | None = None  # None: as many as heads
    feed_forward: Width | None = None  # None: 4 x hidden
    tied: bool = False  # one table for the embeddings and the output
    dropout: Annotated[Real, Ge(0), Lt(1)] = 0.0
    config: dict[str, Any] = Field(default_factory=dict)  # any further key of the model type's configuration

    @model_validator(mode="before")
    @classmethod
    def _sizes_come_with_a_folder(cls, values: Any) -> Any:
        sizes = ("type", "layers", "hidden", "heads", "key_value_heads", "feed_forward", "tied", "dropout")
        return refuse_together(values, "folder", sizes, "comes with the model in the folder; config changes it")

    @model_validator(mode="after")
    def _heads_divide(self) -> "DecoderModel":
        """Each key-value head must serve as many query heads as every other one."""
        check_heads(self.hidden, self.heads)
        if self.key_value_heads and self.heads % self.key_value_heads:
            fitting = [str(count) for count in range(1, self.heads + 1) if self.heads % count == 0]
            raise ValueError(
                f"heads is {self.heads} and key_value_heads is {self.key_value_heads}, which doesn't divide it; use "
                f"key_value_heads of {', '.join(fitting)}"
            )
        return self


def configure(model: DecoderModel, *, vocabulary: int, end: int | None, length: int) -> Any:
    """The configuration of a model for ids below `vocabulary`, rounded up to a multiple of 8, and `length` tokens.

    Raises UserError for an unknown model type, a key or value that it doesn't take.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as WITH_HEAD
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES as ENCODERS

    folder = transformers_model.folder_of(model.folder)
    if folder is not None:
        return transformers_model.config_of_folder(folder, model.config, _FOR_TRAINING)
    # Encoders have a head for next tokens too, but they would look at them.
    decoders = WITH_HEAD.keys() - ENCODERS.keys()
    plain = transformers_model.default_config(model.type, decoders, _KNOWN_TO_FIT)
    fixed = {
        "vocab_size": -(-vocabulary // _ROWS) * _ROWS,
        "bos_token_id": None,
        "eos_token_id": end,
        "max_position_embeddings": length,
        "tie_word_embeddings": model.tied,
    }
    transformers_model.check_keys(model.config, plain)
    return transformers_model.made(type(plain), {**_sizes(model, plain), **fixed, **_FOR_TRAINING, **model.config})


def build(model: DecoderModel, config: "PreTrainedConfig") -> "PreTrainedModel":
    """Build the model: random weights under torch's seed, or those of the folder.

    Raises UserError where the folder lacks weights.
    """
    from transformers import AutoModelForCausalLM

    folder = transformers_model.folder_of(model.folder)
    if folder is None:
        return AutoModelForCausalLM.from_config(config)
    built, lacking = transformers_model.load(AutoModelForCausalLM, folder, config)
    if lacking:
        raise UserError(
            f"{transformers_model.FOLDER}: {folder} lacks fitting weights for {len(lacking)} parameters, such as "
            f"{lacking[0]}; use a folder written by save_pretrained, and no config that changes sizes"
        )
    return built


def check(model: DecoderModel, config: "PreTrainedConfig", vocabulary: int, length: int) -> None:
    """Raise UserError where the model can't be built, or is too small for the token ids or the length."""
    built = _look_at(model, config)
    transformers_model.check_size(built, config.vocab_size, vocabulary, length, "recipe.data.length")


def flops(model: DecoderModel, config: "PreTrainedConfig", length: int) -> float:
    """Floating-point operations of forward and backward for a sample of `length` tokens.

    6 N + 12 L H Q T for each token, as in the PaLM paper (Chowdhery et al. 2022, appendix B), with N parameters,
    L layers, H heads of size Q, and T tokens in the sequence. N leaves out tables that are only looked up in:
    positions, and embeddings unless they are the output's as well. The mask is not made use of: attention
    counts whole.
    """
    from torch import nn

    built = _look_at(model, config)
    looked_up = {id(module.weight) for module in built.modules() if isinstance(module, nn.Embedding)}
    head = built.get_output_embeddings()
    looked_up -= {id(head.weight)} if head is not None else set()
    parameters = sum(p.numel() for p in built.parameters() if id(p) not in looked_up)
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention = 12 * config.num_hidden_layers * config.num_attention_heads * head_size * length
    return float((6 * parameters + attention) * length)


def _look_at(model: DecoderModel, config: "PreTrainedConfig") -> "PreTrainedModel":
    return transformers_model.trial(
        partial(build, model, config),
        name=model.folder or model.type,
        is_new=model.folder is None,
        kind="a language model",
        known_to_fit=_KNOWN_TO_FIT,
    )


def _sizes(model: DecoderModel, plain: "PreTrainedConfig") -> dict[str, Any]:
    """The sizes under the keys that this model type has for them."""
    wanted_sizes = {
        "layers": model.layers,
        "hidden": model.hidden,
        "heads": model.heads,
        "feed_forward": model.feed_forward or 4 * model.hidden,
    }
    if model.key_value_heads or hasattr(plain, "num_key_value_heads"):
        wanted_sizes["key_value_heads"] = model.key_value_heads or model.heads
    sizes: dict[str, Any] = transformers_model.sized(plain, wanted_sizes, _KNOWN_TO_FIT)
    if hasattr(plain, "head_dim"):  # in some types a size of its own
        sizes["head_dim"] = model.hidden // model.heads
    return sizes | {key: model.dropout for key in _DROPOUT_KEYS if hasattr(plain, key)}


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LanguageData:
    """Running text, what of it is held out, and how it becomes blocks of tokens.

    A path may be "package:NAME/FILE", a file inside an installed package.
    """

    source: str = "shakespeare"  # or people-daily, or a .txt file, or a folder of such files
    eval_source: str | None = None  # held-out text in a source of its own
    held_out: Annotated[Real, Ge(0), Lt(1)] = 0.1  # fraction of `source`, in pieces; 0: no evaluation
    length: Annotated[Whole, Ge(2), Le(MOST_LENGTH)] = 256  # tokens of a sample
    # Of a tokenizer trained on the training text.
    vocabulary: Annotated[Whole, Ge(tokenizer.SMALLEST_STREAM), Le(MOST_VOCABULARY)] = 4096
    tokenizer: str | None = None  # a tokenizer.json or a folder; None: the model folder's, or else a trained one

    @model_validator(mode="before")
    @classmethod
    def _one_way(cls, values: Any) -> Any:
        refuse_together(values, "eval_source", ["held_out"], "is for held-out text taken from source")
        return refuse_together(values, "tokenizer", ["vocabulary"], "is for a tokenizer trained on the text")


def read(data: LanguageData) -> RunningText:
    """Read the texts and hold out what is asked for.

    Raises UserError for a source that can't be read, and where a side of the split is empty.
    """
    documents = corpus.read(data.source, "recipe.data.source")
    if data.eval_source is not None:
        held_out = corpus.read(data.eval_source, "recipe.data.eval_source")
        return RunningText(train=documents, held_out=held_out)
    return corpus.divide(documents, data.held_out, "recipe.data.held_out")


class TokenLoss(Ratio):
    """The mean over all tokens. Updated with loss sums and token counts of samples, both [samples]."""

    def update(self, loss_sums: Tensor, tokens: Tensor) -> None:
        self.add(loss_sums, tokens.sum())


class Perplexity(TokenLoss):
    """exp of the mean loss: among how many tokens, equally likely, a model seems to choose."""

    def compute(self) -> Tensor:
        return super().compute().exp()


def language_metrics() -> dict[str, Metric]:
    return {"perplexity": Perplexity(), "token_loss": TokenLoss()}


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
            raise UserError(f"{self._data.source} has fewer than two tokens to train on; use a longer text")
        check(self._model, self._config, self._vocabulary, self._data.length)

    def model(self) -> "nn.Module":
        return build(self._model, self._config)

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
        return cross_entropy(output, batch.targets, "sum"), (batch.targets != IGNORED).sum()

    def metrics(self) -> "Mapping[str, Metric]":
        """Perplexity, and the mean loss of a token in nats."""
        return language_metrics()

    def scores(self, output: Any, batch: Batch) -> "tuple[Tensor, Tensor]":
        """Each sample's summed loss and its number of tokens: what ranks exchange is not the logits."""
        return loss_of_rows(output, batch.targets)

    def predict(self, model: Model, request: ToPredict) -> Iterator[Prediction]:
        """The loss of each held-out block, or of each line of a file; and how the model goes on with the line."""
        if request.file is None:
            yield from super().predict(model, request)
            return
        for text in lines_of(request.file):
            prediction = {"text": text, **self._loss_of(text, model, request.batch)}
            if request.new_tokens:
                prediction["continuation"] = self._continued(text, model, request.new_tokens)
            yield prediction

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
        prompt = ids or ([] if self._end is None else [self._end])  # a document stands behind another's end
        written: list[int] = []
        while prompt and len(written) < most:
            seen = [*prompt, *written][-self._data.length :]
            logits = getattr(output := model({"input_ids": torch.tensor([seen])}), "logits", output)
            following = int(logits[0, -1].argmax())
            if following == self._end:
                break
            written.append(following)
        return self._tokenizer.tokenizer.decode(written)

    def shape(self) -> ModelShape:
        """What layouts must divide."""
        config = self._config
        return ModelShape(
            heads=config.num_attention_heads,
            key_value_heads=getattr(config, "num_key_value_heads", None),
            layers=config.num_hidden_layers,
            sequence_length=self._data.length,
        )

    def work(self) -> Work:
        """Tokens of a sample, and FLOPs of its forward and backward."""
        length = self._data.length
        return Work(tokens=length, flops=flops(self._model, self._config, length))

    def pretrained(self) -> Pretrained:
        """What a Hugging Face folder needs besides the weights."""
        from transformers import AutoModelForCausalLM

        config = deepcopy(self._config)
        config.use_cache = True  # for writing text, for which the folder is meant
        folder = transformers_model.folder_of(self._model.folder) if self._data.tokenizer is None else None
        tokenizer = transformers_model.tokenizer_of(
            self._tokenizer.tokenizer, folder, padding=self._padding, end=self._end, length=self._data.length
        )
        return Pretrained(build=AutoModelForCausalLM.from_config, config=config, processors=[tokenizer])

    @cached_property
    def _text(self) -> RunningText:
        return read(self._data)

    @cached_property
    def _loaded_tokenizer(self) -> StreamTokenizer | None:
        return transformers_model.loaded_tokenizer(tokenizer.load_stream, self._data.tokenizer, self._model.folder)

    @cached_property
    def _tokenizer(self) -> StreamTokenizer:
        return self._loaded_tokenizer or cache.stream_tokenizer(self._text.train, self._data.vocabulary, self._cache)

    @property
    def _vocabulary(self) -> int:
        """The rows of the embedding. A tokenizer that was trained on a short text may need fewer than configured."""
        loaded = self._loaded_tokenizer
        if loaded is None:
            return self._data.vocabulary
        return max(loaded.size, self._padding + 1)

    @cached_property
    def _padding(self) -> int:
        """The padding token's id; where a tokenizer has none, a new one, or in a model of its own the end's.

        Any id is right here: what stands at padding is never looked back at, and its targets are ignored.
        """
        loaded = self._loaded_tokenizer
        if loaded is None:
            return tokenizer.STREAM_PADDING
        if loaded.padding is not None:
            return loaded.padding
        return loaded.size if self._model.folder is None else loaded.end or 0

    @property
    def _end(self) -> int | None:
        return tokenizer.STREAM_END if self._loaded_tokenizer is None else self._loaded_tokenizer.end

    @cached_property
    def _train_set(self) -> TokenBlocks:
        return self._blocks(self._text.train)

    @cached_property
    def _eval_set(self) -> TokenBlocks | None:
        return self._blocks(self._text.held_out) if self._text.held_out else None

    def _blocks(self, documents: Sequence[str]) -> TokenBlocks:
        """The documents as one stream of tokens, cut into blocks."""
        stream, checksum = cache.stream(documents, self._tokenizer, self._cache)
        return TokenBlocks(stream, length=self._data.length, padding=self._padding, checksum=checksum)

    @property
    def _cache(self) -> DataCache:
        return DataCache.of(environment.snapshot())

    @cached_property
    def _config(self) -> "PreTrainedConfig":
        return configure(self._model, vocabulary=self._vocabulary, end=self._end, length=self._data.length)


def _mean(total: float, count: int) -> Prediction:
    return {"loss": total / count if count else None, "tokens": count}


def cross_entropy(output: Any, targets: "Tensor", reduction: str) -> "Tensor":
    """Cross-entropy of next tokens, in float32 at least; of a transformers output or plain logits."""
    from torch.nn import functional as F

    logits = getattr(output, "logits", output)  # [batch, length, vocabulary]
    logits = logits.reshape(-1, logits.shape[-1])
    wide = logits.float() if logits.element_size() < 4 else logits
    return F.cross_entropy(wide, targets.reshape(-1), reduction=reduction, ignore_index=IGNORED)


def loss_of_rows(output: Any, targets: "Tensor") -> "tuple[Tensor, Tensor]":
    """Each row's summed cross-entropy, and the number of its targets that count: both [batch]."""
    losses = cross_entropy(output, targets, "none").reshape(targets.shape)  # [batch, length]
    return losses.double().sum(dim=1), (targets != IGNORED).sum(dim=1)
