"""Chat models: a pretrained decoder learns what the assistant says in conversations, completions, or any text.

From the top: the data (which rows, what of them counts, packing), then the task.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from annotated_types import Ge, Le, Lt
from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from samestep import environment
from samestep.data import cache
from samestep.data.cache import DataCache
from samestep.data.conversations import Encoder, Format, TrainOn, format_of, what_counts
from samestep.data.packing import TokenRows, TokenSample, TokenSamples, best_fit, fitted
from samestep.data.records import Rows, read_rows
from samestep.data.split import check_split, split
from samestep.data.tokenizer import IGNORED
from samestep.data.types import Batch
from samestep.errors import UserError
from samestep.field_types import STRICT, Positive, Real, Whole
from samestep.layout import ModelShape
from samestep.limits import MOST_LENGTH
from samestep.progress import phases
from samestep.tasks import chat_model
from samestep.tasks.base import Task, Work
from samestep.tasks.causal_lm import cross_entropy, language_metrics, loss_of_rows
from samestep.tasks.chat_model import ChatModel
from samestep.tasks.metrics import Metric
from samestep.tasks.prediction import Model, Prediction, ToPredict, lines_of
from samestep.tasks.reading import Piece, Reading
from samestep.tasks.registry import refuse_together
from samestep.tasks.transformers_model import Pretrained

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_SOURCE, _EVAL_SOURCE = "recipe.data.source", "recipe.data.eval_source"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ChatData:
    """Rows of conversations, prompts and completions or texts, and what of them is learnt."""

    source: str  # a .jsonl, .json, .csv, .parquet or .arrow file, a folder, a saved data set, or a hub's name
    split: str | None = None  # of a folder or a data set that has several
    eval_source: str | None = None  # held-out rows in a source of their own
    eval_split: str | None = None  # held-out rows in a split of their own, of eval_source or else of source
    held_out: Annotated[Real, Ge(0), Lt(1)] = 0.0  # fraction of the rows of source; 0: no evaluation
    columns: dict[str, str] = Field(default_factory=dict)  # a name of a format -> the column that has it
    limit: Positive | None = None  # the first rows alone, for quick tests
    chat_template: str | None = None  # chatml, or a file of Jinja; None: the tokenizer's
    train_on: TrainOn | None = None  # None: assistant in conversations, the completion, or all of a text
    length: Annotated[Whole, Ge(2), Le(MOST_LENGTH)] = 1024  # most tokens of a row, and of a packed sample
    too_long: Literal["cut", "drop"] = "cut"  # what is done with longer rows
    packing: bool = False  # several rows in one sample, none of which attends to another

    @model_validator(mode="before")
    @classmethod
    def _one_way(cls, values: Any) -> Any:
        why = "is for held-out rows taken from source"
        return refuse_together(
            refuse_together(values, "eval_source", ["held_out"], why), "eval_split", ["held_out"], why
        )


class Chat(Task):
    """Predict the next token of what counts. Everything is read and tokenised once, at the first use."""

    predicts_from = "a text file, with what a user says in each line"
    writes_text = True

    def __init__(self, *, data: ChatData, model: ChatModel) -> None:
        self._data = data
        self._model = model

    def check(self) -> None:
        """Raise UserError for what is wrong with the data, or where model and data don't fit."""
        phases.say(f"{self._data.source}: {self.reading().sentence}", once="rows")
        if not len(self.train_set()):
            raise UserError(
                f"{self._data.source}: nothing counts in any of its {len(self._rows):,} rows within "
                f"recipe.data.length {self._data.length}; use a greater length, or recipe.data.train_on: all"
            )
        highest = int(self._train_rows.ids.max())
        rows = self._table
        if highest >= rows:
            token = self.tokenizer.convert_ids_to_tokens(highest)
            raise UserError(
                f'recipe.model.name: the data has token {highest} ("{token}"), and the model of {self._model.name} '
                f"embeddings for {rows}; use the tokenizer that belongs to the model, or name the token in "
                "recipe.model.new_tokens, for which the table grows"
            )
        built = self._built()
        chat_model.check_positions(built, self._data.length)
        if self._data.packing:
            check_keeps_apart(built)

    def model(self) -> "nn.Module":
        return self._built()

    def train_set(self) -> TokenSamples:
        return self._train_set

    def eval_set(self) -> TokenSamples | None:
        return self._eval_set

    def sample_lengths(self) -> Sequence[int]:
        return self._train_set.lengths.tolist()

    def collate(self, samples: Sequence[TokenSample]) -> Batch:
        """Pad to the longest of these samples, behind them, where nothing looks back at it."""
        import torch

        longest = max(len(sample.inputs) for sample in samples)
        inputs = np.full((len(samples), longest), self._padding, dtype=np.int64)
        targets = np.full_like(inputs, IGNORED)
        positions = np.empty_like(inputs)
        for row, sample in enumerate(samples):
            length = len(sample.inputs)
            inputs[row, :length], targets[row, :length] = sample.inputs, sample.targets
            positions[row, :length], positions[row, length:] = sample.positions, np.arange(longest - length)
        arguments = {"input_ids": torch.from_numpy(inputs)}  # [batch, longest]
        if self._data.packing:
            # Where positions begin anew, the model's mask keeps documents apart.
            arguments["position_ids"] = torch.from_numpy(positions)
        return Batch(arguments, torch.from_numpy(targets))

    def loss(self, output: Any, batch: Batch) -> "tuple[Tensor, Tensor | int]":
        """Cross-entropy summed over the tokens that count, and how many they are."""
        return cross_entropy(output, batch.targets, "sum"), (batch.targets != IGNORED).sum()

    def metrics(self) -> "Mapping[str, Metric]":
        """Perplexity, and the mean loss of a token in nats, over the tokens that count."""
        return language_metrics()

    def scores(self, output: Any, batch: Batch) -> "tuple[Tensor, Tensor]":
        """Each sample's summed loss and how many tokens count: what ranks exchange is not the logits."""
        return loss_of_rows(output, batch.targets)

    def predictions(self, output: Any, batch: Batch) -> Sequence[Prediction]:
        """The mean loss of each sample's tokens that count in nats, and how many they are."""
        sums, counts = self.scores(output, batch)
        return [
            {"loss": total / count if count else None, "tokens": count}
            for total, count in zip(sums.tolist(), counts.tolist(), strict=True)
        ]

    def predict(self, model: Model, request: ToPredict) -> Iterator[Prediction]:
        """The loss of each held-out sample; or an answer to each line of a file."""
        if request.file is None:
            yield from super().predict(model, request)
            return
        for text in lines_of(request.file):
            messages = [{"role": "user", "content": text}]
            answer = "".join(self.answer(model, messages, request.new_tokens)) if text else ""
            yield {"text": text, "answer": answer}

    def answer(
        self, model: Model, messages: Sequence[Mapping[str, Any]], most: int, *, remembers: bool = False
    ) -> Iterator[str]:
        """Yield the assistant's answer piece by piece: the likeliest token each time."""
        import torch

        # The data need not be here.
        encoder = Encoder(tokenizer=self.tokenizer, form=Format.MESSAGES, train_on="assistant")
        seen = encoder.prompt(messages, "the conversation")
        memory: dict[str, Any] = {}
        ends = set(self._ends)
        written: list[int] = []
        told = ""
        while len(written) < most:
            inputs = {"input_ids": torch.tensor([seen if remembers else seen[-self._data.length :]])}
            output = model({**inputs, **memory, "use_cache": True} if remembers else inputs)
            following = int(getattr(output, "logits", output)[0, -1].argmax())
            if following in ends:
                break
            if remembers:
                memory, seen = {"past_key_values": output.past_key_values}, [following]
            else:
                seen = [*seen, following]
            written.append(following)
            text = self.tokenizer.decode(written, skip_special_tokens=True)
            assert isinstance(text, str)
            if not text.endswith("\ufffd"):  # else of a character whose other bytes are to come
                yield text.removeprefix(told)
                told = text

    def shape(self) -> ModelShape:
        """What layouts must divide."""
        config = self._config.get_text_config()
        return ModelShape(
            heads=config.num_attention_heads,
            key_value_heads=getattr(config, "num_key_value_heads", None),
            layers=config.num_hidden_layers,
            sequence_length=int(self._train_set.lengths.max()) if len(self._train_set) else self._data.length,
        )

    def work(self) -> Work:
        """Tokens of a sample, on average."""
        lengths = self._train_set.lengths
        return Work(tokens=round(float(lengths.mean())) if len(lengths) else None)

    def pretrained(self) -> Pretrained:
        """What a Hugging Face folder needs besides the weights."""
        return chat_model.exported(self._model, self.tokenizer, self._table)

    def reading(self) -> Reading:
        """How the rows are read."""
        rows, data = self._train_rows, self._data
        facts: dict[str, str | int] = {
            "rows": len(self._rows),
            "format": self._form.value,
            "counts": self._encoder.train_on,
            "cut": rows.cut,
            "dropped": rows.dropped,
        }
        held_out = self._held_out_rows
        if held_out is not None:
            facts["held out"] = len(held_out)
        if data.packing:
            used = int(rows.lengths.sum())
            facts["packed into"] = len(self._train_set)
            facts["filled"] = f"{used / max(1, len(self._train_set) * data.length):.1%}"
        return Reading(
            facts=facts,
            lengths=rows.lengths.tolist(),
            samples=len(self._train_set),
            pieces=self._pieces,
            place=self._places,
        )

    def _pieces(self, index: int) -> list[Piece]:
        pieces: list[Piece] = []
        for number in self._train_set.rows_of(index):
            row = self._train_rows.row(number)
            for place, (ids, counts) in enumerate(self._encoder.runs(row)):
                text = str(self.tokenizer.decode(ids))
                pieces.append(Piece(text=text, counts=counts, tokens=ids, begins=place == 0))
        return pieces

    def _places(self, index: int) -> str:
        numbers = self._train_rows.numbers
        return ", ".join(self._rows.place(self._train[numbers[row]]) for row in self._train_set.rows_of(index))

    @cached_property
    def _rows(self) -> Rows:
        data = self._data
        return read_rows(data.source, _SOURCE, split=data.split, columns=data.columns, limit=data.limit)

    @cached_property
    def _form(self) -> Format:
        form = format_of(self._rows, self._data.source)
        if form is Format.PREFERENCE:
            raise UserError(f"{self._data.source} has {form.value}, which are for task preference, not for task chat")
        return form

    @cached_property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        return chat_model.tokenizer_of(self._model, self._data.chat_template)

    @cached_property
    def _encoder(self) -> Encoder:
        train_on = what_counts(self._form, self._data.train_on, "recipe.data.train_on")
        return Encoder(tokenizer=self.tokenizer, form=self._form, train_on=train_on)

    @cached_property
    def _divided(self) -> tuple[Sequence[int], Sequence[int]]:
        """The numbers of the rows to train on, and of those held out of the same source."""
        held_out = self._data.held_out
        if not held_out:
            return range(len(self._rows)), ()
        train, held = split(cache.texts_of_rows(self._rows, range(len(self._rows))), held_out)
        check_split(len(train), len(held), held_out, "recipe.data.held_out")
        return train, held

    @property
    def _train(self) -> Sequence[int]:
        return self._divided[0]

    @cached_property
    def _train_rows(self) -> TokenRows:
        return self._tokenised(self._rows, self._train)

    @cached_property
    def _held_out_rows(self) -> TokenRows | None:
        data = self._data
        if data.eval_source is not None or data.eval_split is not None:
            source, where = (data.eval_source, _EVAL_SOURCE) if data.eval_source else (data.source, _SOURCE)
            rows = read_rows(source, where, split=data.eval_split, columns=data.columns, limit=data.limit)
            return self._tokenised(rows, range(len(rows)))
        return self._tokenised(self._rows, self._divided[1]) if self._divided[1] else None

    def _tokenised(self, rows: Rows, numbers: Sequence[int]) -> TokenRows:
        tokens = cache.encoded_rows(rows, numbers, self._encoder, self._cache)
        return fitted(tokens, most=self._data.length, drop=self._data.too_long == "drop")

    @cached_property
    def _train_set(self) -> TokenSamples:
        return self._samples(self._train_rows)

    @cached_property
    def _eval_set(self) -> TokenSamples | None:
        rows = self._held_out_rows
        return None if rows is None else self._samples(rows)

    def _samples(self, rows: TokenRows) -> TokenSamples:
        groups = best_fit(rows.lengths.tolist(), self._data.length) if self._data.packing else None
        return TokenSamples(rows, groups)

    @property
    def _padding(self) -> int:
        """Any id is right: what stands at padding is never looked back at, and its targets are ignored."""
        candidates = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id)
        return next((number for number in candidates if isinstance(number, int)), 0)

    @cached_property
    def _ends(self) -> Sequence[int]:
        """The tokens that end an answer."""
        ends = self.pretrained().processors[-1].eos_token_id
        return ends if isinstance(ends, list) else [] if ends is None else [ends]

    @property
    def _cache(self) -> DataCache:
        return DataCache.of(environment.snapshot())

    @cached_property
    def _config(self) -> Any:
        return chat_model.configure(self._model)

    @property
    def _table(self) -> int:
        """Rows of the table of tokens."""
        grows = bool(self._model.new_tokens) or self._data.chat_template is not None
        return chat_model.rows_of_table(self._config, self.tokenizer, grows=grows)

    def _built(self) -> "PreTrainedModel":
        return chat_model.build(self._model, self._table)


_APART = 1e-4  # of the largest logit: float32's rounding is far below, another document's tokens far above


def check_keeps_apart(model: "PreTrainedModel") -> None:
    """Raise UserError for a model in which a document sees the one before it in the same sample.

    Tried with two documents of a few tokens: models that pass state on, or that make no mask of positions, do.
    """
    import torch

    embeddings: Any = model.get_input_embeddings()
    rows = int(embeddings.weight.shape[0])
    ids = torch.arange(9) * 7 % rows
    first, second = ids[:5], ids[5:]
    positions = torch.cat([torch.arange(5), torch.arange(4)])
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            # A cache of keys would turn off the mask.
            both = model(input_ids=torch.cat([first, second])[None], position_ids=positions[None], use_cache=False)
            alone = model(input_ids=second[None], use_cache=False).logits[0]
    except TypeError as error:
        raise UserError(
            f"recipe.data.packing: {type(model).__name__} takes no position_ids ({error}), by which it would keep "
            "documents apart; leave packing out"
        ) from None
    finally:
        model.train(was_training)
    off = float((both.logits[0, len(first) :] - alone).abs().max() / alone.abs().max().clamp_min(1e-30))
    if not off < _APART:
        raise UserError(
            f"recipe.data.packing: in {type(model).__name__} a document sees the one that is packed before it (its "
            f"logits are off by {off:.1g} of the largest), since it makes no mask of where positions begin anew; "
            "leave packing out"
        )
