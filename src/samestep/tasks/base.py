"""Task: what can be trained. A model, its data, and a loss given as a sum and a count."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, runtime_checkable

from samestep.errors import UserError
from samestep.layout import ModelShape
from samestep.tasks.prediction import Model, Prediction, ToPredict, from_scores, predict_each

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torchmetrics import Metric

    from samestep.tasks.transformers_model import Pretrained


class Batch(NamedTuple):
    """Some samples, collated.

    `inputs` is what the model is called with: a mapping becomes keywords, a tuple positions, anything else
    the one argument. `targets` is for the loss and the metrics; the model doesn't see it.
    """

    inputs: Any
    targets: Any


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a sample costs, for the speeds that a training reports; None where it isn't known."""

    tokens: int | None = None
    flops: float | None = None  # floating-point operations of forward and backward, without any recomputation


@runtime_checkable
class Samples(Protocol):
    """A data set with a length; a sample is found by its index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class Task(ABC):
    """What is trained. A task says nothing of ranks, devices or layouts.

    Every rank builds the task for itself, so everything here must be a function of the arguments alone.
    """

    predicts_from: ClassVar[str | None] = None  # what `predict` reads, in words; None: held-out samples alone
    writes_text: ClassVar[bool] = False  # whether `predict` goes on with a text

    @abstractmethod
    def model(self) -> "nn.Module":
        """Build the model. It is called under the recipe's seed, on the CPU, in float32."""

    @abstractmethod
    def train_set(self) -> Samples:
        """The samples to learn from, in an order that never changes."""

    @abstractmethod
    def loss(self, output: Any, batch: Batch) -> "tuple[Tensor, Tensor | int]":
        """The loss summed over a batch's terms, and how many terms (samples, or unmasked tokens) those are.

        Never a mean: the step divides the sum over all ranks and micro-batches by the count over all.
        """

    def eval_set(self) -> Samples | None:
        """The held-out samples; None where there are none."""
        return None

    def collate(self, samples: Sequence[Any]) -> Batch:
        """Put samples together. The default stacks (input, target) pairs."""
        from torch.utils.data import default_collate

        inputs, targets = default_collate(list(samples))
        # default_collate turns tuples into lists, but a tuple is called as positions and a list as one argument.
        return Batch(tuple(inputs) if isinstance(samples[0][0], tuple) else inputs, targets)

    def metrics(self) -> "Mapping[str, Metric]":
        """New torchmetrics objects by name; each is updated with what `scores` gives."""
        return {}

    def scores(self, output: Any, batch: Batch) -> "tuple[Tensor, Tensor]":
        """The predictions and the targets that the metrics are updated with."""
        return default_scores(output, batch)

    def class_names(self) -> Sequence[str] | None:
        """Names for the rows of per-class metrics, where there are classes."""
        return None

    def predict(self, model: Model, wanted: ToPredict) -> Iterator[Prediction]:
        """What the model makes of each sample: of the file's, where `predicts_from` says so, or the held-out ones."""
        yield from predict_each(self, model, self.eval_set() or (), wanted.batch)

    def predictions(self, output: Any, batch: Batch) -> Sequence[Prediction]:
        """A mapping for each sample of a batch, of values that JSON can hold."""
        return from_scores(self, output, batch)

    def shape(self) -> ModelShape:
        """The model's sizes that a layout must divide, known without building it."""
        return ModelShape()

    def work(self) -> Work:
        """What a sample costs; from it tokens a second and the use of the device are reported."""
        return Work()

    def pretrained(self) -> "Pretrained | None":
        """The configuration and the tokenizer of a transformers model; None where the model is another one."""
        return None

    def check(self) -> None:
        """Raise UserError for what is wrong with the data, before any process starts."""
        if len(self.train_set()) == 0:
            raise UserError("the data set is empty; at least one sample is needed")


def default_scores(output: Any, batch: Batch) -> "tuple[Tensor, Tensor]":
    """What the model gave, and what it should have given."""
    return output, batch.targets


def call(model: Any, inputs: Any) -> Any:
    """Call a model with a batch's inputs."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, tuple):
        return model(*inputs)
    return model(inputs)


def sum_and_count(loss: Any) -> "tuple[Tensor, Tensor | int]":
    """What a loss gave, which must be a pair. Raises UserError where it is a mean, or anything else alone."""
    if isinstance(loss, tuple) and len(loss) == 2:
        return loss
    raise UserError(
        f"the loss gave a {type(loss).__name__} alone; it must give a pair: the sum over the batch's terms, "
        "and how many terms those are"
    )
