"""Task: what can be trained. A model, its data, and a loss given as a sum and a count."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from samestep.data.types import Batch, Samples, as_batch, missing_sample
from samestep.errors import UserError, one_line
from samestep.layout import ModelShape
from samestep.tasks.prediction import Model, Prediction, ToPredict, of_classes

if TYPE_CHECKING:
    from torch import Tensor, nn

    from samestep.tasks.metrics import Metric
    from samestep.tasks.reading import Reading
    from samestep.tasks.transformers_model import Pretrained


@dataclass(frozen=True, kw_only=True)
class Work:
    """Cost of a sample, for the reported speeds; None if unknown."""

    tokens: int | None = None
    flops: float | None = None  # floating-point operations of forward and backward, without any recomputation


class Task(ABC):
    """What is trained: a model, its data and its loss. Independent of ranks, devices and layouts.

    Every rank builds the task for itself, so everything here must be a function of the arguments alone.
    """

    predicts_from: ClassVar[str | None] = None  # description of what `predict` reads; None: held-out samples only
    # The weights of the loss's terms, where it gives a mapping of name -> (sum, count); the step's loss is then the
    # sum over the terms of weight * sum / count.
    loss_weights: ClassVar[Mapping[str, float]] = {}
    writes_text: ClassVar[bool] = False  # whether `predict` continues a text

    @abstractmethod
    def model(self) -> "nn.Module":
        """Build the model. It is called under the recipe's seed, on the CPU, in float32."""

    @abstractmethod
    def train_set(self) -> Samples:
        """The samples to learn from, in an order that never changes."""

    @abstractmethod
    def loss(self, output: Any, batch: Batch) -> Any:  # tuple[Tensor, Tensor | int], or a mapping of such by name
        """The loss summed over a batch's terms, and how many terms (samples, or unmasked tokens) those are.

        Never a mean: the step divides the sum over all ranks and micro-batches by the count over all. With
        `loss_weights`, a mapping of the terms' names to such pairs. A loss that compares the samples of a batch takes
        a third parameter, `gather` (`samestep.Gather`).
        """

    def eval_set(self) -> Samples | None:
        """The held-out samples; None where there are none."""
        return None

    def sample_lengths(self) -> Sequence[int] | None:
        """The length of each training sample, such as its tokens, for `run.group_by_length`; None: they have none."""
        return None

    def collate(self, samples: Sequence[Any]) -> Batch:
        """Put samples together. The default stacks (input, target) pairs."""
        from torch.utils.data import default_collate

        first = samples[0]
        if not (isinstance(first, (tuple, list)) and len(first) == 2):
            what = f"a {type(first).__name__}" + (f" of {len(first)}" if isinstance(first, (tuple, list)) else "")
            raise UserError(
                f"a sample is {what}, and collate is not written, which stacks pairs of (input, target); write "
                "collate(samples), which returns samestep.Batch(inputs, targets)"
            )
        try:
            inputs, targets = default_collate(list(samples))
        except (RuntimeError, TypeError) as error:  # of unlike shapes, or no tensors or numbers
            raise UserError(
                f"these samples can't be stacked ({one_line(error)}); write collate(samples), which returns "
                "samestep.Batch(inputs, targets)"
            ) from error
        # default_collate converts tuples to lists, but a tuple means positional arguments and a list a single one.
        return Batch(tuple(inputs) if isinstance(samples[0][0], tuple) else inputs, targets)

    def metrics(self) -> "Mapping[str, Metric]":
        """New metrics by name: torchmetrics objects, or others that update (with what `scores` gives) and compute."""
        return {}

    def scores(self, output: Any, batch: Batch) -> "tuple[Tensor, Tensor]":
        """Return predictions and targets for the metrics."""
        return default_scores(output, batch)

    def batch_buffers(self) -> "Mapping[str, str]":
        """Return the model's buffers that a training forward fills from samples: name or pattern -> "mean" or "sum".

        "mean": updated by a mean over the samples, such as `usage.lerp_(hits.mean(0), 0.1)`; "sum": a sum over them
        is added, such as `counts += hits.sum(0)`. Both then cover the global batch under every layout. Batch norm's
        statistics need no entry.
        """
        return {}

    def class_names(self) -> Sequence[str] | None:
        """Names for the rows of per-class metrics, where there are classes."""
        return None

    def predict(self, model: Model, request: ToPredict) -> Iterator[Prediction]:
        """Yield a prediction for each sample: of the samples of a file (`predicts_from`), or of the held-out ones."""
        yield from predict_each(self, model, self.eval_set() or (), request.batch)

    def answer(
        self, model: Model, messages: Sequence[Mapping[str, Any]], most: int, *, remembers: bool = False
    ) -> Iterator[str] | None:
        """Yield the answer to a conversation piece by piece, of at most `most` tokens; None: it has none.

        `remembers`: the model takes and gives `past_key_values`, so that each token is computed once.
        """
        return None

    def predictions(self, output: Any, batch: Batch) -> Sequence[Prediction]:
        """A mapping for each sample of a batch, of values that JSON can hold.

        The default has each sample's prediction and target, as the metrics get them, as numbers or lists.
        """
        predictions, targets = self.scores(output, batch)
        pairs = zip(predictions.tolist(), targets.tolist(), strict=True)
        return [{"prediction": prediction, "target": target} for prediction, target in pairs]

    def shape(self) -> ModelShape:
        """The model's sizes that a layout must divide, known without building it."""
        return ModelShape()

    def work(self) -> Work:
        """Return a sample's cost, from which tokens a second and utilization are computed."""
        return Work()

    def pretrained(self) -> "Pretrained | None":
        """The configuration and the processors of a transformers model; None where `model()` gives another one."""
        from samestep.tasks.transformers_model import pretrained_of

        return pretrained_of(self.model())

    def reading(self) -> "Reading | None":
        """How the training samples are read, for `samestep data`; None: there is nothing to show."""
        return None

    def tried_facts(self) -> Any:
        """What `check` has found by trying the model, in values that can be pickled; None: nothing.

        It is found once a job, and handed to the task of each rank (`take_facts`).
        """
        return None

    def take_facts(self, facts: Any) -> None:
        """Take what `tried_facts` gave for a task of the same arguments."""
        assert facts is None, "a task that finds facts must take them"

    def held_out_tried(self) -> bool:
        """Whether `check` has run the model on held-out samples in evaluation mode already."""
        return False

    def check(self) -> None:
        """Raise UserError for what is wrong with the data, before any process starts."""
        if len(self.train_set()) == 0:
            raise UserError("the data set is empty; at least one sample is needed")

    def tried_model(self) -> bool:
        """Whether `check` has run the model on the first samples in float32, which the contract then leaves out."""
        return False


class Classification(Task):
    """A task whose model gives a number for each class, and whose targets are numbers of classes."""

    @abstractmethod
    def class_names(self) -> Sequence[str]:
        """The classes in the order of their numbers."""

    def loss(self, output: Any, batch: Batch) -> "tuple[Tensor, int]":
        """Cross-entropy summed over the samples, and how many they are."""
        from torch.nn import functional as F

        return F.cross_entropy(_logits(output), batch.targets, reduction="sum"), len(batch.targets)

    def metrics(self) -> "Mapping[str, Metric]":
        """Accuracy over all samples, and by class; the rows of the confusion matrix sum to the support."""
        from samestep.tasks.metrics import classification_metrics

        return classification_metrics(len(self.class_names()))

    def scores(self, output: Any, batch: Batch) -> "tuple[Tensor, Tensor]":
        """The probability of each class, [batch, classes], and the true classes."""
        return _logits(output).softmax(dim=-1).float(), batch.targets

    def answer(
        self, model: Model, messages: Sequence[Mapping[str, Any]], most: int, *, remembers: bool = False
    ) -> Iterator[str] | None:
        """Yield the answer to a conversation piece by piece, of at most `most` tokens; None: it has none.

        `remembers`: the model takes and gives `past_key_values`, so that each token is computed once.
        """
        return None

    def predictions(self, output: Any, batch: Batch) -> Sequence[Prediction]:
        """The likeliest class of each sample, and its probability."""
        return of_classes(*self.scores(output, batch), self.class_names())


def _logits(output: Any) -> "Tensor":
    """[batch, classes], in float32 at least; of a transformers output or a plain tensor."""
    logits = getattr(output, "logits", output)
    return logits.float() if logits.element_size() < 4 else logits


def default_scores(output: Any, batch: Batch) -> "tuple[Tensor, Tensor]":
    """Return the model's output and the batch's targets. Raises UserError if either is not a tensor."""
    from torch import Tensor

    if not isinstance(output, Tensor):
        logits = " as `return output.logits, batch.targets`" if hasattr(output, "logits") else ""
        raise UserError(
            f"the model gives a {type(output).__name__}, with which no metric can be updated; write "
            f"scores(output, batch){logits}, which returns predictions and targets"
        )
    if not isinstance(batch.targets, Tensor):
        raise UserError(
            f"collate gives a {type(batch.targets).__name__} as targets, with which no metric can be updated; write "
            "scores(output, batch), which returns predictions and targets"
        )
    return output, batch.targets


def predict_each(task: Task, model: Model, samples: Samples, batch: int) -> Iterator[Prediction]:
    """Yield the predictions for samples, in their order; `batch` samples go through the model at once."""
    from samestep.data.sample_draws import sample_of

    for start in range(0, len(samples), batch):
        some = [sample_of(samples, index) for index in range(start, min(start + batch, len(samples)))]
        collated = as_batch(task.collate(some))
        yield from task.predictions(model(collated.inputs), collated)


class InTurn(NamedTuple):
    """What a model is called with in a turn of a step (`tasks.turns`): a batch's inputs, and the keyword `turn`."""

    inputs: Any
    turn: str


def call(model: Any, inputs: Any) -> Any:
    """Call a model with a batch's inputs."""
    keywords = {}
    if isinstance(inputs, InTurn):
        inputs, keywords["turn"] = inputs
    if isinstance(inputs, Mapping):
        return model(**inputs, **keywords)
    if isinstance(inputs, tuple):
        return model(*inputs, **keywords)
    return model(inputs, **keywords)


def check_data(task: Task) -> None:
    """Raise UserError for data sets from which samples can't be drawn by index."""
    check_samples(task.train_set(), "train_set()")
    held_out = task.eval_set()
    if held_out is not None:
        check_samples(held_out, "eval_set()")


def check_samples(samples: Any, what: str) -> None:
    """Raise UserError unless `samples` have a length, an index, and a sample at both ends.

    `what` says what they are, such as "train_set()".
    """
    from samestep.data.sample_draws import sample_of

    length = _length(samples, what)
    for index in dict.fromkeys((0, length - 1)) if length else ():
        try:
            sample_of(samples, index)
        except NotImplementedError:  # of torch's Dataset, whose subclass has no __getitem__
            raise UserError(f"{what}: {_no_index(samples)}") from None
        except (IndexError, KeyError) as error:
            raise UserError(f"{what}: {missing_sample(samples, index, error)}") from error


def _length(samples: Any, what: str) -> int:
    """Return the number of samples. Raises UserError if they can't be indexed by number."""
    from torch.utils.data import DataLoader, IterableDataset

    kind = type(samples).__name__
    if samples is None:
        raise UserError(f"{what}: None holds no samples; {_USE}")
    if isinstance(samples, DataLoader):
        raise UserError(
            f"{what}: a DataLoader has batches in an order of its own; use the data set that it reads "
            "(loader.dataset), and its collate_fn as collate"
        )
    if isinstance(samples, (str, bytes)) or (isinstance(samples, Mapping) and 0 not in samples and len(samples)):
        raise UserError(f"{what}: a {kind} is not numbered from 0; {_USE}")
    if isinstance(samples, IterableDataset) or not hasattr(samples, "__getitem__"):
        raise UserError(f"{what}: {_no_index(samples)}")
    try:
        return len(samples)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise UserError(f"{what}: this {kind} has no length ({one_line(error)}); {_USE}") from None


_USE = "use a list of samples, or a data set with __len__ and __getitem__"


def _no_index(samples: Any) -> str:
    return (
        f"a {type(samples).__name__} can only be read from front to back, and samples are dealt out by number; use "
        "list(...) of it, or a data set with __len__ and __getitem__"
    )


def sum_and_count(loss: Any) -> "tuple[Tensor, Tensor | int]":
    """Check a loss's result: a sum over its terms (a tensor of one number), and their count.

    Raises UserError where it is a mean, or anything else.
    """
    from torch import Tensor

    if not (isinstance(loss, (tuple, list)) and len(loss) == 2):
        what = f"a {type(loss).__name__}" + (f" of {len(loss)}" if isinstance(loss, (tuple, list)) else " alone")
        raise UserError(
            f"the loss gave {'None' if loss is None else what}; it must give a pair: the sum over the batch's terms, "
            f"and how many terms those are{'; terms by name want loss_weights' * isinstance(loss, Mapping)}"
        )
    total, count = loss
    if not isinstance(total, Tensor):
        raise UserError(
            f"the loss gave a {type(total).__name__} as its sum, which has no gradient; use the tensor, without "
            ".item() or float()"
        )
    if total.ndim or not total.is_floating_point():
        what = f"of shape {list(total.shape)}" if total.ndim else f"of dtype {total.dtype}"
        fix = "use .sum() of it" if total.ndim else "use a loss of real numbers"
        raise UserError(f"the loss gave a tensor {what} as its sum, which must be one real number; {fix}")
    return total, _count(count, total)


def _count(count: Any, total: "Tensor") -> "Tensor | int":
    """A loss's count, checked where that makes no accelerator wait."""
    import torch

    if isinstance(count, torch.Tensor):
        if count.numel() != 1:
            raise UserError(
                f"the loss gave a tensor of shape {list(count.shape)} as its count, which must be one number; "
                "use .sum() of it"
            )
        if count.requires_grad:
            raise UserError(
                "the loss gave a count that needs a gradient, and a step divides by it as a plain number, which has "
                "none; use count.detach() if that is meant"
            )
        count = count.reshape(())
        if type(count) is not torch.Tensor or count.device.type != "cpu":
            return count
        value = count.item()
    else:
        value = count
    if isinstance(value, complex) or not hasattr(value, "__float__"):
        raise UserError(f"the loss gave a {type(value).__name__} as its count; use how many terms its sum has")
    if not 0 <= value < float("inf"):
        raise UserError(f"the loss gave {value} as its count; use how many terms its sum has, 0 or more")
    # If nothing counts, the step is sum / count of the other ranks' terms, to which this sum would be added.
    if value == 0 and type(total) is torch.Tensor and total.device.type == "cpu" and abs(total.item()) > 0:
        raise UserError(f"the loss gave a sum of {total.item():.6g} and a count of 0; use how many terms the sum has")
    return count
