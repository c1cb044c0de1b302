"""Preferences: a model learns to give a chosen answer more probability than a rejected one (DPO).

The loss is that of Rafailov et al. 2023, equation 7: a sum over pairs. The two answers of a pair, each behind its
prompt, are packed into one sample, so that a pair is on one rank under every layout. What the reference model gives
is computed once, before the training: it depends on the data and on the model as it was loaded alone.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np
from annotated_types import Gt, Le
from numpy.typing import NDArray

from samestep.data import cache
from samestep.data.conversations import Encoder, Format, Tokens, format_of
from samestep.data.packing import TokenRows, TokenSample, TokenSamples, fitted
from samestep.data.records import Rows
from samestep.data.source_files import digest_of
from samestep.data.tokenizer import IGNORED
from samestep.data.types import Batch
from samestep.errors import UserError
from samestep.field_types import Real
from samestep.progress import phases
from samestep.tasks import chat_model
from samestep.tasks.causal_lm import cross_entropy
from samestep.tasks.chat import Chat, ChatData
from samestep.tasks.chat_model import ChatModel
from samestep.tasks.metrics import ColumnMean, Metric
from samestep.tasks.prediction import Prediction
from samestep.tasks.reading import Reading

if TYPE_CHECKING:
    from torch import Tensor

Margins = NDArray[np.float64]


class Pair(NamedTuple):
    """A chosen answer and a rejected one, in one row."""

    tokens: TokenSample
    sides: NDArray[np.int64]  # [tokens] 1 where a token of the chosen answer counts, -1 of the rejected one, else 0
    reference: float  # how much more log-probability the reference model gives the chosen answer


class Pairs(TokenSamples):
    """Pairs of rows: rows 2 i and 2 i + 1 are sample i."""

    def __init__(self, rows: TokenRows, reference: Margins, model: str) -> None:
        """`reference`: of each pair, [pairs]; `model`: the hash of the reference model."""
        super().__init__(rows, [(row, row + 1) for row in range(0, len(rows), 2)])
        self._reference, self._model = reference, model

    def __getitem__(self, index: int) -> Any:
        tokens = super().__getitem__(index)
        chosen = int(self.rows.lengths[2 * (index % len(self))])
        sides = np.where(np.arange(len(tokens.targets)) < chosen, 1, -1) * (tokens.targets != IGNORED)
        return Pair(tokens, sides.astype(np.int64), float(self._reference[index]))

    def digest(self) -> str:
        """That of the tokens and of the reference model, whose figures are rounded otherwise on other machines."""
        return cache.digest(super().digest(), self._model)


def fitted_pairs(pairs: Sequence[tuple[Tokens, Tokens]], *, most: int, drop: bool) -> TokenRows:
    """Cut both answers of each pair, or drop the pair; so where nothing of an answer is left."""
    whole = [fitted(pair, most=most, drop=drop) for pair in pairs]
    kept = [number for number, rows in enumerate(whole) if not rows.dropped]
    flat = fitted([side for number in kept for side in pairs[number]], most=most, drop=drop)
    return replace(
        flat,
        numbers=np.repeat(np.array(kept, dtype=np.int64), 2),
        cut=sum(bool(whole[number].cut) for number in kept),
        dropped=len(pairs) - len(kept),
    )


class Preference(Chat):
    """Direct preference optimization. `beta`: how much a step away from the reference model costs."""

    def __init__(self, *, data: ChatData, model: ChatModel, beta: Annotated[Real, Gt(0), Le(1000)] = 0.1) -> None:
        if data.train_on is not None:
            raise UserError(f"recipe.data.train_on is {data.train_on}, and of pairs the answers count; leave it out")
        super().__init__(data=replace(data, packing=True), model=model)
        self._beta = beta

    def collate(self, samples: Sequence[Any]) -> Batch:
        """The pairs' tokens with positions that begin anew with the rejected answer's prompt."""
        import torch

        inputs, labels = super().collate([pair.tokens for pair in samples])
        sides = torch.zeros_like(labels)
        for row, pair in enumerate(samples):
            sides[row, : len(pair.sides)] = torch.from_numpy(pair.sides)
        reference = torch.tensor([pair.reference for pair in samples], dtype=torch.float64)
        return Batch(inputs, {"labels": labels, "sides": sides, "reference": reference})

    def loss(self, output: Any, batch: Batch) -> "tuple[Tensor, int]":
        """-log sigmoid(beta * margin) summed over the pairs, and how many they are."""
        margins = _margins(output, batch)
        return self._losses(margins).sum(), len(margins)

    def _losses(self, margins: "Tensor") -> "Tensor":
        from torch.nn import functional as F

        return F.softplus(-self._beta * margins)

    def metrics(self) -> "dict[str, Metric]":
        """The mean loss, how often the chosen answer is preferred, and by what margin on average, over pairs."""
        return {"loss": ColumnMean(0), "accuracy": ColumnMean(1), "margin": ColumnMean(2)}

    def scores(self, output: Any, batch: Batch) -> "tuple[Tensor, Tensor]":
        """Each pair's loss, whether its chosen answer is preferred, and its margin; and ones: [pairs, 3] both."""
        import torch

        margins = _margins(output, batch).detach().double()
        values = torch.stack([self._losses(margins), (margins > 0).double(), self._beta * margins], dim=1)
        return values, torch.ones_like(values)

    def predictions(self, output: Any, batch: Batch) -> Sequence[Prediction]:
        """The margin of each pair, times beta: above 0 where the chosen answer is preferred."""
        return [{"margin": self._beta * margin} for margin in _margins(output, batch).tolist()]

    def reading(self) -> Reading:
        """How the pairs are read; both answers' tokens."""
        reading = super().reading()
        facts = {name: value for name, value in reading.facts.items() if name not in ("packed into", "filled")}
        return replace(reading, facts=facts | {"counts": "both answers"})

    @cached_property
    def _form(self) -> Format:
        form = format_of(self._rows, self._data.source)
        if form is not Format.PREFERENCE:
            raise UserError(
                f"{self._data.source} has {form.value}, and task preference needs the columns chosen and rejected; "
                "name yours in recipe.data.columns, or use task chat"
            )
        return form

    @cached_property
    def _encoder(self) -> Encoder:
        return Encoder(tokenizer=self.tokenizer, form=self._form, train_on="completion")

    def _tokenised(self, rows: Rows, numbers: Sequence[int]) -> TokenRows:
        pairs = [self._encoder.encode_pair(rows[number], rows.place(number)) for number in numbers]
        return fitted_pairs(pairs, most=self._data.length, drop=self._data.too_long == "drop")

    def _samples(self, rows: TokenRows) -> Pairs:
        model = digest_of(str(chat_model.folder_of(self._model))) or self._model.name
        without = Pairs(rows, np.zeros(len(rows) // 2), model)
        key = cache.digest(cache.version_of_code(), without.digest(), str(self._model))
        kept = self._cache.get("reference", key, lambda: {"margins": self._reference(without)})
        return Pairs(rows, kept.arrays["margins"].view(np.float64), model)

    def _reference(self, pairs: Pairs) -> Margins:
        """The margins of the model as it was loaded, pair by pair, in float32."""
        import torch

        with phases.phase("computing what the reference model gives", once="reference"), torch.random.fork_rng([]):
            model: Any = self._built().eval()
            with torch.no_grad():
                batches = (self.collate([pairs[index]]) for index in range(len(pairs)))
                margins = [float(_margins(model(**batch.inputs), batch)) for batch in batches]
        return np.array(margins, dtype=np.float64)


def _margins(output: Any, batch: Batch) -> "Tensor":
    """How much more log-probability than the reference a model gives the chosen answer of each pair, [pairs]."""
    labels, sides, reference = (batch.targets[name] for name in ("labels", "sides", "reference"))
    losses = cross_entropy(output, labels, "none").reshape(labels.shape)  # [pairs, tokens]
    return -(losses * sides).sum(dim=1) - reference.to(losses.dtype)
