"""What people hand over by mistake: each is one sentence, whatever it would have made PyTorch trip over."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from model_tasks import NextWord
from small_tasks import Points
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchmetrics.classification import MulticlassAccuracy
from transformers.modeling_outputs import SequenceClassifierOutput

import samestep
from samestep.data.order import SampleOrder


class Handed(Points):
    """Points, with any part of the task replaced by what a test hands over."""

    def __init__(self, **parts: Any) -> None:
        super().__init__(samples=20, held_out=6)
        for name, part in parts.items():
            setattr(self, name, part)


class Longer(Dataset[Any]):
    """Says that it has more samples than it gives."""

    def __init__(self, *, says: int, gives: int, holes: Sequence[int] = ()) -> None:
        self.says, self.holes = says, holes
        self.pairs = Points(samples=gives, held_out=0).pairs

    def __len__(self) -> int:
        return self.says

    def __getitem__(self, index: int) -> Any:
        if index in self.holes:
            raise IndexError("no such file")
        return self.pairs[index]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from Points(samples=5).pairs


class CountedStream(Stream):
    def __len__(self) -> int:
        return 5


def generator() -> Iterator[Any]:
    yield from Points(samples=5).pairs


def rows(samples: Sequence[Any]) -> dict[str, Any]:
    """As collators of transformers give them: a mapping with the labels inside."""
    return {
        "input_ids": torch.stack([x for x, _ in samples]),
        "labels": torch.tensor([int(y) for _, y in samples]),
    }


def loss_of(give: Callable[[Tensor], Any]) -> Callable[[Any, samestep.Batch], Any]:
    """A loss that hands the cross-entropy of each sample to `give`."""
    return lambda output, batch: give(nn.functional.cross_entropy(output, batch.targets, reduction="none"))


class Looked(nn.Module):
    """An embedding of five words, and three classes."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.words = nn.Embedding(5, 4, **options)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.words(x.abs().long().clamp(max=9)).mean(1))


class WithLogits(nn.Module):
    """A model that gives a ModelOutput."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Any:
        return SequenceClassifierOutput(logits=self.linear(x))


def wrapped() -> nn.Module:
    return nn.DataParallel(nn.Linear(4, 3))


def meta() -> nn.Module:
    with torch.device("meta"):
        return nn.Linear(4, 3)


def frozen() -> nn.Module:
    return nn.Linear(4, 3).requires_grad_(False)


def lazy_in_trouble() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(8), nn.Linear(7, 3))


def labels_to_five(samples: Sequence[Any]) -> samestep.Batch:
    return samestep.Batch(torch.stack([x for x, _ in samples]), torch.arange(len(samples)))


PAIR = r"must give a pair"
WRONG: Mapping[str, tuple[Mapping[str, Any], str]] = {
    # data sets
    "data: None": ({"train_set": lambda: None}, r"train_set\(\): None holds no samples"),
    "data: a generator": ({"train_set": generator}, r"train_set\(\): a generator can only.*use list\(...\) of it"),
    "data: a stream": ({"train_set": Stream}, r"train_set\(\): a Stream can only.*dealt out by number"),
    "data: a stream with a length": (
        {"train_set": CountedStream},
        r"train_set\(\): a CountedStream can only.*dealt out",
    ),
    "data: a loader": (
        {"train_set": lambda: DataLoader(Points().pairs)},  # pyright: ignore[reportArgumentType]
        r"a DataLoader has batches.*loader.dataset",
    ),
    "data: columns": (
        {"train_set": lambda: {"x": [1, 2], "y": [0, 1]}},
        r"a dict is not numbered from 0",
    ),
    "data: a number": ({"train_set": lambda: torch.tensor(3)}, r"this Tensor has no length"),
    "data: nothing in it": ({"train_set": list}, r"the data set is empty"),
    "data: too long a length": (
        {"train_set": lambda: Longer(says=21, gives=20)},
        r"a Longer of length 21 gives no sample 20 \(IndexError: .*test_wrong_inputs.py:\d+\)",
    ),
    "data: a hole": (
        {"train_set": lambda: Longer(says=20, gives=20, holes=[7])},
        r"a Longer of length 20 gives no sample 7 \(IndexError: no such file, at .*test_wrong_inputs.py:\d+\)",
    ),
    "held-out data: a generator": ({"eval_set": generator}, r"eval_set\(\): a generator"),
    # collate
    "samples: mappings": ({"train_set": lambda: [{"x": 1, "y": 2}] * 9}, r"a sample is a dict.*write collate"),
    "samples: of unlike lengths": (
        {"train_set": lambda: [(torch.ones(n), 1) for n in range(1, 9)]},
        r"can't be stacked.*write collate",
    ),
    "collate: a mapping": ({"collate": rows}, rf"a dict with the keys input_ids, labels; it {PAIR}"),
    "collate: a BatchEncoding": (
        {"collate": lambda samples: transformers.BatchEncoding(rows(samples))},
        rf"a BatchEncoding with the keys input_ids, labels; it {PAIR}",
    ),
    "collate: a tensor": ({"collate": lambda samples: torch.ones(2, 4)}, rf"collate gave a Tensor; it {PAIR}"),
    "collate: three things": ({"collate": lambda samples: (1, 2, 3)}, rf"collate gave a tuple of 3; it {PAIR}"),
    "collate: None": ({"collate": lambda samples: None}, rf"collate gave None; it {PAIR}"),
    # models
    "model: None": ({"model": lambda: None}, r"model\(\) gave None; use an nn.Module"),
    "model: a function": ({"model": lambda: torch.relu}, r"model\(\) gave a builtin_function_or_method"),
    "model: wrapped": ({"model": wrapped}, r"the model \(DataParallel\) is wrapped.*use its .module"),
    "model: compiled": (
        {"model": lambda: torch.compile(nn.Linear(4, 3), backend="eager")},
        r"torch.compile made.*run.compile",
    ),
    "model: on the meta device": ({"model": meta}, r"weight is on the meta device"),
    "model: sparse": (
        {"model": partial(Looked, sparse=True)},
        r"words \(Embedding\) has sparse gradients.*use sparse=False",
    ),
    "model: frozen": ({"model": frozen}, r"no parameter that needs a gradient"),
    "model: lazy, and its sizes don't fit": ({"model": lazy_in_trouble}, r"0 \(LazyLinear\) gets its shape.*fails"),
    # losses
    "loss: a mean": ({"loss": loss_of(torch.mean)}, rf"the loss gave a Tensor alone; it {PAIR}"),
    "loss: a vector": ({"loss": loss_of(lambda each: (each, len(each)))}, r"a tensor of shape \[\d+\] as its sum"),
    "loss: a float": (
        {"loss": loss_of(lambda each: (each.sum().item(), len(each)))},
        r"a float as its sum.*without .item\(\)",
    ),
    "loss: None": ({"loss": lambda output, batch: None}, rf"the loss gave None; it {PAIR}"),
    "loss: three things": ({"loss": loss_of(lambda each: (each.sum(), 1, 2))}, rf"a tuple of 3; it {PAIR}"),
    "loss: whole numbers": (
        {"loss": lambda output, batch: (batch.targets.sum(), 1)},
        r"of dtype torch.int64 as its sum",
    ),
    "loss: a ModelOutput": (
        {"model": WithLogits, "loss": lambda output, batch: output},
        rf"the loss gave a SequenceClassifierOutput alone; it {PAIR}",
    ),
    "loss: counts of many": (
        {"loss": loss_of(lambda each: (each.sum(), torch.ones_like(each)))},
        r"a tensor of shape \[\d+\] as its count.*use .sum\(\)",
    ),
    "loss: a negative count": ({"loss": loss_of(lambda each: (each.sum(), -1))}, r"the loss gave -1 as its count"),
    "loss: no count": ({"loss": loss_of(lambda each: (each.sum(), None))}, r"a NoneType as its count"),
    "loss: a sum of nothing": ({"loss": loss_of(lambda each: (each.sum(), 0))}, r"a sum of .* and a count of 0"),
    # labels and ids
    "a label out of range": (
        {"collate": labels_to_five},
        r"step 0, samples [\d, ]+: a label or an id is out of range \(Target \d is out .*\), at .*small_tasks",
    ),
    "an id out of range": (
        {
            "model": Looked,
            "train_set": lambda: [(10 * point, label) for point, label in Points(samples=20).pairs],
        },
        r"step 0, samples [\d, ]+: a label or an id is out of range \(index out .*\), at .*test_wrong_inputs.py:\d+",
    ),
    # metrics
    "scores: of a ModelOutput": (
        {
            "model": WithLogits,
            "loss": lambda output, batch: (
                nn.functional.cross_entropy(output.logits, batch.targets, reduction="sum"),
                len(batch.targets),
            ),
        },
        r"gives a SequenceClassifierOutput.*`return output.logits, batch.targets`",
    ),
    "scores: a tensor alone": (
        {"scores": lambda output, batch: output},
        r"scores gave a Tensor; it must give a pair of tensors",
    ),
    "metrics: functions": ({"metrics": lambda: {"accuracy": torch.sum}}, r'metric "accuracy" is a builtin_function'),
    "metrics: one": ({"metrics": lambda: MulticlassAccuracy(3)}, r"use a dict of torchmetrics objects by name"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_input_is_one_sentence(name: str, tmp_path: Path) -> None:
    parts, sentence = WRONG[name]
    recipe = samestep.Recipe(task=Handed(**parts), batch=8, steps=3)
    with pytest.raises(samestep.UserError, match=sentence) as found:
        samestep.train(recipe, layout="single", device="cpu", folder=tmp_path / "run", check=False)
    is_one_sentence(str(found.value))


def test_a_loading_process_tells_a_wrong_length_as_this_one_does(tmp_path: Path) -> None:
    recipe = samestep.Recipe(task=Holed(), batch=8, steps=3)
    with pytest.raises(samestep.UserError, match=r"gives no sample 7 \(IndexError: no such file") as found:
        samestep.train(recipe, layout="dp2", device="cpu", workers=1, folder=tmp_path / "run", check=False)
    is_one_sentence(str(found.value))


class Holed(Points):
    def train_set(self) -> samestep.Samples:
        return Longer(says=20, gives=20, holes=[7])


class Sliced(NextWord):
    """Its embedding and its output are in slices on two ranks; a word of the last step's is out of range."""

    def __init__(self, *, of: str) -> None:
        super().__init__(kind="gpt2", samples=12, layers=2)
        self.of = of

    def targets(self, words: Tensor, samples: Sequence[Any]) -> Tensor:
        found = super().targets(words, samples)
        if self.of == "labels" and self.poisoned(samples):
            found[-1, 0] = 99
        return found

    def collate(self, samples: Sequence[Any]) -> samestep.Batch:
        batch = super().collate(samples)
        if self.of == "ids" and self.poisoned(samples):
            batch.inputs["input_ids"][-1, 0] = 99
        return batch

    def poisoned(self, samples: Sequence[Any]) -> bool:
        return any(sample is self.samples[LAST] for sample in samples)


LAST = int(SampleOrder(size=12, batch=4, seed=0).global_batch(2).max())  # not among the first two


@pytest.mark.slow
@pytest.mark.parametrize("of", [pytest.param("labels", marks=pytest.mark.slow), "ids"])
def test_slices_of_a_vocabulary_see_what_is_out_of_range_too(of: str, tmp_path: Path) -> None:
    recipe = samestep.Recipe(task=Sliced(of=of), batch=4, steps=3)
    with pytest.raises(
        samestep.UserError, match=r"step 2, samples [\d, ]+: a label or an id is out of range"
    ) as found:
        samestep.train(recipe, layout="tp2", device="cpu", folder=tmp_path / "run", check=False)
    is_one_sentence(str(found.value))


def collated(samples: Sequence[Any]) -> samestep.Batch:
    return Points().collate(samples)


def prepared(session: samestep.Session, model: Any = None, optimizer: Any = None) -> None:
    model = nn.Linear(4, 3) if model is None else model
    session.prepare(model, optimizer or torch.optim.SGD(model.parameters(), lr=0.1))


def stepped(session: samestep.Session, batch: Any = None, loss: Any = None) -> None:
    prepared(session)
    batches = session.batches(Points().pairs, batch=8, collate=collated, steps=1)
    session.step(next(iter(batches)) if batch is None else batch, loss or Points().loss)


def evaluated(session: samestep.Session, samples: Any, **others: Any) -> None:
    prepared(session)
    session.evaluate(samples, **{"collate": collated, "metrics": {"accuracy": MulticlassAccuracy(3)}, **others})


def dealt(session: samestep.Session, samples: Any, **others: Any) -> None:
    next(iter(session.batches(samples, **{"collate": collated, "batch": 8, **others})))


WRONG_IN_A_LOOP: Mapping[str, tuple[Callable[[samestep.Session], None], str]] = {
    "prepare: a function": (
        lambda s: s.prepare(torch.relu, torch.optim.SGD(nn.Linear(1, 1).parameters())),  # pyright: ignore
        r"session.prepare gave a builtin_function_or_method; use an nn.Module",
    ),
    "prepare: no optimizer": (lambda s: prepared(s, optimizer="adam"), r"the optimizer is a str; use a torch.optim"),
    "prepare: a lazy model": (lambda s: prepared(s, nn.LazyLinear(3)), r"LazyLinear\) has no shape yet; call the"),
    "prepare: on the meta device": (lambda s: prepared(s, meta()), r"weight is on the meta device"),
    "step: before prepare": (lambda s: s.step(None, Points().loss), r"session.step: the batch is None"),  # pyright: ignore
    "step: a pair": (
        lambda s: stepped(s, batch=collated(Points().pairs[:3])),
        r"the batch is a Batch; use what `for batch in session.batches",
    ),
    "step: a loss's value": (lambda s: stepped(s, loss=torch.tensor(0.5)), r"the loss is a Tensor; use a function"),
    "batches: a loader": (
        lambda s: dealt(s, DataLoader(Longer(says=9, gives=9))),
        r"batch= and collate= and a DataLoader are given, .* or give the DataLoader's data set",
    ),  # pyright: ignore
    "batches: a generator": (lambda s: dealt(s, generator()), r"session.batches\(samples\): a generator"),
    "batches: no collate": (lambda s: dealt(s, Points().pairs, collate="pad"), r"collate is a str; use a function"),
    "batches: of no samples": (lambda s: dealt(s, Points().pairs, batch=0), r"batch is 0; use a whole number"),
    "batches: half a step": (lambda s: dealt(s, Points().pairs, steps=0.5), r"steps is 0.5; use a whole number"),
    "batches: mappings": (
        lambda s: dealt(s, Points().pairs, collate=rows),
        rf"the keys input_ids, labels; it {PAIR}",
    ),
    "evaluate: None": (lambda s: evaluated(s, None), r"session.evaluate\(samples\): None"),
    "evaluate: no metric": (lambda s: evaluated(s, Points().pairs, metrics={"x": 1}), r'metric "x" is a int'),
}


@pytest.mark.parametrize("name", WRONG_IN_A_LOOP)
def test_a_wrong_input_to_a_loop_of_ones_own_is_one_sentence(name: str) -> None:
    hand_over, sentence = WRONG_IN_A_LOOP[name]
    with (
        pytest.raises(samestep.UserError, match=sentence) as found,
        samestep.session(layout="single", device="cpu", threads=1) as session,
    ):
        hand_over(session)
    is_one_sentence(str(found.value))


def is_one_sentence(message: str) -> None:
    assert "\n" not in message
    assert "Traceback" not in message
    assert len(message) < 400
