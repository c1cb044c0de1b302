"""HuggingFace: a model of transformers with its own loss, a data set and a collator, handed over as they are."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.data import DataLoader

from samestep.data.types import Batch, Samples
from samestep.errors import UserError, described
from samestep.extras import need
from samestep.progress import phases
from samestep.tasks.base import Task, check_samples
from samestep.tasks.first_rows import chosen_rows
from samestep.tasks.losses import Gather, alone, task_loss
from samestep.tasks.model_facts import ModelFacts, built_of, model_facts
from samestep.tasks.model_loss import NoFitError, computed_in, copied, loss_of
from samestep.tasks.prediction import Prediction, of_classes
from samestep.tasks.transformers_model import pretrained_of
from samestep.tasks.weighted_terms import terms_in

if TYPE_CHECKING:
    from samestep.tasks.metrics import Metric
    from samestep.tasks.transformers_model import Pretrained

_COUNT = "count"  # of the loss's terms, among a batch's targets


class HuggingFace(Task):
    """Trains a model that computes its own loss.

    `model` is an nn.Module, or a function without arguments that builds one, called under the recipe's seed. Its
    forward takes the keys that `collator` makes of rows, labels among them, and returns a `loss` that is a mean.
    `data` and `eval_data` are lists of rows, torch's data sets or those of Hugging Face's `datasets`. `collator` goes
    from rows to a mapping of tensors, or of lists and mappings of such; without one, rows are stacked. What the loss
    is a mean over is found by trying the model on a few rows, once; `count`, a function from a collated mapping to a
    number, says it instead. `loss`, a function of the model's output and the collated mapping, gives the sum and the
    count of a loss of the user's own, or with `loss_weights` a mapping of the terms' names to such pairs. `split`, a
    function of the collated mapping, gives how many rows each sample has in tensors that join the samples' rows.
    `processor`, a tokenizer or another of transformers' processors, or a list of such, goes along with exported
    weights; without one, that of the collator.
    """

    def __init__(
        self,
        *,
        model: "nn.Module | Callable[[], nn.Module]",
        data: Samples,
        collator: Callable[[list[Any]], Mapping[str, Any]] | None = None,
        eval_data: Samples | None = None,
        count: "Callable[[Mapping[str, Any]], Tensor | int] | None" = None,
        loss: Callable[..., Any] | None = None,
        loss_weights: Mapping[str, float] | None = None,
        split: Callable[[Mapping[str, Any]], Any] | None = None,
        processor: Any = None,
    ) -> None:
        need("task HuggingFace", "transformers")
        _check_model(model)
        functions = {"collator": collator, "count": count, "loss": loss, "split": split}
        for name, function in functions.items():
            if function is not None and not callable(function):
                raise UserError(f"{name}= is a {type(function).__name__}; use a function")
        if loss is not None and count is not None:
            raise UserError(
                "loss= and count= are both given, and loss= gives the count with its sum; leave count= out"
            )
        if loss is None and loss_weights:
            raise UserError("loss_weights= is given without loss=, whose terms it names; give both")
        processors = _processors(collator) if processor is None else _listed(processor)
        for one in processors:
            if not callable(getattr(one, "save_pretrained", None)):
                raise UserError(
                    f"processor= is a {type(one).__name__}; use what has save_pretrained, such as a tokenizer"
                )
        _check_data(data, "data=")
        if eval_data is not None:
            _check_data(eval_data, "eval_data=")
        self._model = model
        self._data = data
        self._eval_data = eval_data
        self._collator = collator
        self._count = count
        self._own_loss = None if loss is None else _OwnLoss(loss)
        self._weights = dict(loss_weights or {})
        self._split = split
        self._processors = processors
        self._known: ModelFacts | None = None

    def __getstate__(self) -> dict[str, Any]:
        """State sent to the ranks, with all that trying the model has found."""
        if isinstance(self._model, nn.Module) and any(map(parametrize.is_parametrized, self._model.modules())):
            raise UserError(
                f"model= is a {type(self._model).__name__} with parametrized layers (weight_norm, spectral_norm, "
                "orthogonal), which PyTorch can't send to other processes; use a function that builds it"
            )
        state = dict(self.__dict__)
        if isinstance(self._model, nn.Module) and next(computed_in(self._model), None) is not None:
            state["_model"] = copied(self._model)  # tensors of a graph stay here
        return state

    def check(self) -> None:
        """Try the model on the first rows. Raises UserError where it can't be trained on them."""
        facts = self._facts
        for rows, where in ((self._data, "data="), (self._eval_data, "eval_data=")):
            if isinstance(rows, list):
                _check_rows(rows, where, facts)

    def tried_facts(self) -> ModelFacts:
        """What trying the model has found."""
        return self._facts

    def take_facts(self, facts: Any) -> None:
        """Know a model's facts without trying it."""
        if isinstance(facts, ModelFacts):
            self._known = facts

    def tried_model(self) -> bool:
        """Whether the model's own loss has been computed in float32; one of the user's has not."""
        return self._own_loss is None

    def held_out_tried(self) -> bool:
        """Whether the model has been tried on held-out rows, and nobody's code but ours scores them."""
        own = {name: getattr(type(self), name) is getattr(HuggingFace, name) for name in ("scores", "metrics")}
        return self._facts.held_out and all(own.values())

    def model(self) -> nn.Module:
        """A copy of the model that was given, or a new one of the function."""
        model = copied(self._model) if isinstance(self._model, nn.Module) else self._model()
        return model if (contrast := self._facts.contrast) is None else contrast.follow(model)

    def pretrained(self) -> "Pretrained | None":
        """What goes along with exported weights; None where the model isn't one of transformers."""
        return pretrained_of(self.model(), self._processors)

    def train_set(self) -> Samples:
        return self._data

    def eval_set(self) -> Samples | None:
        return self._eval_data

    def sample_lengths(self) -> list[int] | None:
        """The number of ids in each row's `input_ids`; None where the rows have none."""
        return self._lengths

    @cached_property
    def _lengths(self) -> list[int] | None:
        """Computed once, since it reads every row; ranks receive the result."""
        if not isinstance(self._data[0], Mapping) or "input_ids" not in self._data[0]:
            return None
        return [len(self._data[index]["input_ids"]) for index in range(len(self._data))]

    def collate(self, samples: Sequence[Any]) -> Batch:
        """The collator's mapping as the model's inputs; labels and the number of the loss's terms as targets.

        For a loss of the user's own the targets are what the model doesn't take.
        """
        facts = self._facts
        collated = self._collated(samples)
        inputs = {key: value for key, value in collated.items() if facts.takes(key)}
        split = None if self._split is None else self._split(collated)
        if self._own_loss is not None:
            return Batch(inputs, {key: value for key, value in collated.items() if key not in inputs}, split)
        facts.check(inputs)
        labels = {name: inputs[name] for name in facts.labels}
        if facts.weighted:
            return Batch(inputs, {**labels, _COUNT: facts.counts(inputs, len(samples))}, split)
        count = self._count(inputs) if self._count is not None else facts.count(inputs, len(samples))
        return Batch(inputs, {**labels, _COUNT: int(count)}, split)

    @property
    def loss(self) -> Callable[..., Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The loss as a sum and a count, or those of its terms by name; with `gather` where it compares samples."""
        if self._own_loss is not None:
            return self._own_loss
        if self._facts.weighted:
            return self._own_terms
        return self._own_mean if self._facts.contrast is None else self._contrast

    @property
    def loss_weights(self) -> Mapping[str, float]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The weights of the terms of the user's own loss, or of the model's, where it has several."""
        if self._own_loss is not None:
            return self._weights
        return {name: term.weight for name, term in self._facts.weighted.items()}

    def _contrast(self, output: Any, batch: Batch, gather: Gather = alone) -> tuple[Tensor, int]:
        """The contrastive loss of a batch's samples, held against those of the global batch."""
        assert self._facts.contrast is not None
        return self._facts.contrast.loss_sum(output, gather), batch.targets[_COUNT]

    def _own_mean(self, output: Any, batch: Batch) -> tuple[Tensor, int]:
        """The model's mean times its count. Where no label counts, a sum of nothing: the mean would be NaN."""
        count = batch.targets[_COUNT]
        if not count:
            return _nothing(output), 0
        return loss_of(output) * (count + self._facts.slack), count

    def _own_terms(self, output: Any, batch: Batch) -> Mapping[str, tuple[Tensor, int]]:
        """Each term of the model's loss as a sum and a count."""
        terms = terms_in(output)
        return {
            name: (terms[name] * count if count else _nothing(output), count)
            for name, count in batch.targets[_COUNT].items()
        }

    def metrics(self) -> "Mapping[str, Metric]":
        """The mean loss of a term, and where labels are classes the share of them that the model tells right.

        Of a contrastive loss, how often a held-out sample's nearest embedding of the other kind is its own.
        """
        from samestep.tasks.metrics import ColumnMean, Nearest

        if (contrast := self._facts.contrast) is not None:
            return {f"{rows}_to_{columns}": Nearest(turned=turned) for turned, (rows, columns) in contrast.directions}
        names = [*(self.loss_weights or ("loss",)), *(("accuracy",) if self._facts.classes else ())]
        return {name: ColumnMean(column) for column, name in enumerate(names)}

    def scores(self, output: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        """A batch's sums and the counts that they are to be divided by: of the loss, and of right labels.

        Of a contrastive loss the two embeddings of each sample.
        """
        if (contrast := self._facts.contrast) is not None:
            first, second = contrast.embeddings
            return output[first], output[second]
        pairs = [*task_loss(self.loss, self.loss_weights).terms_of_whole_batch(output, batch).values()]
        if self._facts.classes:
            right, labels = self._right(output, batch)
            pairs.append((torch.tensor(float(right)), labels))
        sums = torch.stack([total.detach().double().cpu() for total, _ in pairs])
        counts = torch.tensor([float(count) for _, count in pairs], dtype=torch.float64)
        return sums[None], counts[None]  # both [1, terms]

    def predictions(self, output: Any, batch: Batch) -> Sequence[Prediction]:
        """Each sample's likeliest class and its probability, or those of its labels; else what the model gives.

        Of a contrastive loss the two embeddings of each sample.
        """
        if (contrast := self._facts.contrast) is not None:
            names = contrast.embeddings
            rows = zip(*(output[name].tolist() for name in names), strict=True)
            return [dict(zip(names, row, strict=True)) for row in rows]
        logits = getattr(output, "logits", None)
        if not isinstance(logits, Tensor):
            raise UserError(
                f"{type(output).__name__} has no logits to predict from; write a task of your own with `predictions`"
            )
        labels = {**batch.inputs, **batch.targets}.get(next(iter(self._facts.labels), ""))
        if not isinstance(labels, Tensor) or len(labels) != len(logits):
            return [{"prediction": row} for row in logits.tolist()]
        if not self._facts.classes:
            return [
                {"prediction": row, "target": target}
                for row, target in zip(logits.tolist(), labels.tolist(), strict=True)
            ]
        if labels.ndim == 1:
            return of_classes(logits.softmax(dim=-1), labels, self._facts.names)
        predicted, targets, counted = self._labelled(logits.argmax(dim=-1), labels)
        return [
            {"prediction": row[mask].tolist(), "target": target[mask].tolist()}
            for row, target, mask in zip(predicted, targets, counted, strict=True)
        ]

    def _right(self, output: Any, batch: Batch) -> tuple[int, int]:
        """The number of labels that the model predicts, and the number of all labels that count."""
        labels = batch.targets[self._facts.labels[0]]
        predicted, targets, counted = self._labelled(output.logits.argmax(dim=-1), labels)
        return int(((predicted == targets) & counted).sum()), int(counted.sum())

    def _labelled(self, predicted: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Predictions, labels, and a mask of the labels that count. Where the loss is that of the next token, labels
        are shifted by one token."""
        terms = self._facts.terms
        if terms is not None and terms.kind == "shifted":
            predicted, labels = predicted[..., :-1], labels[..., 1:]
        return predicted, labels, labels >= 0 if terms is None else labels != terms.ignored

    def _collated(self, samples: Sequence[Any]) -> Mapping[str, Any]:
        """A batch as the collator gives it. Raises UserError for what is no mapping of tensors."""
        rows = [dict(row) if isinstance(row, Mapping) else row for row in samples]  # some collators change them
        collated = _stacked(rows) if self._collator is None else self._collator(rows)
        if not isinstance(collated, Mapping):
            raise UserError(
                f"the collator gave a {type(collated).__name__}; use one that gives a mapping of the names in the "
                "model's forward to tensors"
            )
        for key, value in collated.items():
            if (inside := _no_tensor_in(value)) is not None:
                raise UserError(
                    f"the collator gave a {inside} as {key}; use tensors (a tokenizer gives them with "
                    'return_tensors="pt"), or lists and mappings of tensors'
                )
        return collated

    @property
    def _facts(self) -> ModelFacts:
        """What trying the model on a few rows has found; ranks receive it."""
        if self._known is None:
            self._known = self._find_facts()
        return self._known

    def _find_facts(self) -> ModelFacts:
        """Try the model on a few rows."""
        with phases.phase("trying the model on a few rows", once="facts"), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            built = built_of(self._model)
            return self._found(built)

    def _found(self, built: nn.Module) -> ModelFacts:
        """Try a model on rows, and on others where it can't take those: a wrong row is named by other checks."""
        name = getattr(self._collator, "__name__", type(self._collator).__name__)
        refusal: UserError | None = None
        for chosen in chosen_rows(self._data, self._eval_data, self._collated, name):
            try:
                return model_facts(
                    built,
                    chosen,
                    is_new=built is not self._model,
                    count=self._count,
                    own_loss=self._own_loss is not None,
                )
            except NoFitError:
                raise
            except UserError as error:
                refusal = error
        assert refusal is not None  # rows have been chosen
        raise refusal


# Under which names transformers' collators, and those of TRL and others, have a processor.
_PROCESSORS = ("tokenizer", "processing_class", "processor", "image_processor", "feature_extractor")


def _processors(collator: Any) -> Sequence[Any]:
    """The processors that a collator has as attributes."""
    held = [getattr(collator, name, None) for name in _PROCESSORS]
    return [processor for processor in held if hasattr(processor, "save_pretrained")]


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else [value]


class _OwnLoss:
    """A loss of the user's, called with the collated mapping. Its line and its parameters are those of the user's."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.__wrapped__ = function

    def __call__(self, output: Any, batch: Batch, **gather: Gather) -> Any:
        return self.__wrapped__(output, {**batch.inputs, **batch.targets}, **gather)


def _no_tensor_in(value: Any) -> str | None:
    """What stands in the place of tensors in a collated value: a list of numbers, an array; None where none does."""
    if type(value).__module__ == "numpy":
        return type(value).__name__
    if isinstance(value, (list, tuple)) and any(isinstance(item, (bool, int, float)) for item in value):
        return type(value).__name__
    inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return next((wrong for item in inside if (wrong := _no_tensor_in(item)) is not None), None)


def _check_rows(rows: list[Any], where: str, facts: ModelFacts) -> None:
    """Raise UserError for rows of unlike keys, and labels of classes that the model doesn't have."""
    for number, row in enumerate(rows):
        if isinstance(rows[0], Mapping) and (not isinstance(row, Mapping) or row.keys() != rows[0].keys()):
            keys = f"the keys {', '.join(map(str, row))}" if isinstance(row, Mapping) else "no keys"
            raise UserError(
                f"{where} row {number} has {keys}, and row 0 has {', '.join(map(str, rows[0]))}; use rows of the "
                "same keys"
            )
        for key in ("label", "labels"):
            if isinstance(row, Mapping) and isinstance(label := row.get(key), int):
                facts.check_label(label, f"{where} row {number}: {key}")


def _check_model(model: Any) -> None:
    """Raise UserError for what is neither a module nor a function that builds one."""
    if isinstance(model, nn.Module):
        return
    if not callable(model):
        load = f'such as AutoModelForCausalLM.from_pretrained("{model}"), ' if isinstance(model, str) else ""
        what = "None" if model is None else f"a {type(model).__name__}"
        raise UserError(f"model= is {what}; use an nn.Module, {load}or a function without arguments that builds one")
    needed = [
        parameter.name
        for parameter in inspect.signature(model).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if needed:
        name = getattr(model, "__name__", type(model).__name__)
        raise UserError(
            f"model= is {name}, which needs {', '.join(needed)}; use an nn.Module, or a function without arguments "
            "that builds one"
        )


def _check_data(data: Any, where: str) -> None:
    """Raise UserError for data without numbered samples."""
    if isinstance(data, DataLoader):
        raise UserError(
            f"{where}: a DataLoader has batches in an order of its own; use {where}loader.dataset, "
            "collator=loader.collate_fn"
        )
    check_samples(data, where)
    if where == "data=" and not len(data):
        raise UserError("data=: the data set is empty; at least one sample is needed")


def _stacked(rows: list[Any]) -> Mapping[str, Any]:
    """Rows of one shape as transformers' Trainer stacks them: numbers and tensors; text is left out."""
    from transformers import default_data_collator

    if not isinstance(rows[0], Mapping):
        raise UserError(
            f"a row is a {type(rows[0]).__name__}, and a model takes names; use mappings, or a collator "
            "that gives one, such as {'pixel_values': ..., 'labels': ...}"
        )
    try:
        return default_data_collator(rows)
    except (KeyError, ValueError, TypeError, RuntimeError) as error:
        raise UserError(
            f"the rows can't be stacked ({described(error)}); use a collator that pads them, such as "
            "transformers.DataCollatorWithPadding(tokenizer)"
        ) from error


def _nothing(output: Any) -> Tensor:
    """Return an empty sum of the model's outputs: zero, with zero gradients for every parameter."""
    tensors = [value for value in _tensors(output) if value.is_floating_point() and value is not loss_of(output)]
    with_gradients = [value for value in tensors if value.requires_grad] or tensors
    return sum((value.flatten()[:0].sum() for value in with_gradients[:1]), torch.zeros(()))


def _tensors(output: Any) -> list[Tensor]:
    values = output.values() if isinstance(output, Mapping) else output
    return [value for value in values if isinstance(value, Tensor)]
