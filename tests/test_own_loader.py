"""A DataLoader that a loop of one's own hands over: what is taken of it, what is told, and what is refused."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import samestep
from samestep.training.own_loader import dealt_parts

POINTS = torch.randn(41, 4, generator=torch.Generator().manual_seed(3))
SET = TensorDataset(POINTS, POINTS[:, 0].round().long() % 3)


class Rows(Dataset[dict[str, Tensor]]):
    """As data sets of Hugging Face: rows by name, which default_collate stacks to a mapping."""

    def __len__(self) -> int:
        return len(SET)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        point, label = SET[index]
        return {"point": point, "label": label}


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(SET)


class OwnBatches(BatchSampler):
    pass


@pytest.fixture
def session() -> Iterator[samestep.Session]:
    with samestep.session(layout="single", device="cpu", threads=1) as session:
        yield session


def batches(session: samestep.Session, samples: Any, **values: Any) -> list[list[int]]:
    """The numbers of the samples of each step."""
    return [batch.samples() for batch in session.batches(samples, **values)]


@pytest.mark.parametrize("shuffle", [True, False])
def test_its_batches_are_those_of_its_parts(session: samestep.Session, shuffle: bool) -> None:
    whole = batches(session, DataLoader(SET, batch_size=16, shuffle=shuffle), epochs=2)
    assert whole == batches(session, SET, batch=16, shuffle=shuffle, epochs=2)
    assert [len(step) for step in whole] == [16, 16, 9] * 2
    assert sorted(itertools.chain(*whole[:3])) == list(range(41))
    assert (whole[0] == list(range(16))) is not shuffle


def test_a_last_batch_that_is_dropped_is_none(session: samestep.Session) -> None:
    whole = batches(session, DataLoader(SET, batch_size=16, drop_last=True), epochs=2)
    assert whole == [list(range(16)), list(range(16, 32))] * 2
    with pytest.raises(samestep.UserError, match=r"41 samples, which fill no batch of 64, .* use a smaller batch"):
        session.batches(DataLoader(SET, batch_size=64, drop_last=True))


def test_samples_of_a_subset_are_those_of_the_sampler(session: samestep.Session) -> None:
    chosen = [5, 7, 11, 13, 17, 19, 23]
    given = session.batches(DataLoader(SET, batch_size=7, sampler=SubsetRandomSampler(chosen)))
    (batch,) = given
    points, _ = batch.micro_batches[0].batch
    assert sorted(points[:, 0].tolist()) == pytest.approx(sorted(POINTS[chosen, 0].tolist()))


def test_of_a_distributed_sampler_each_rank_has_a_batch(
    session: samestep.Session, capfd: pytest.CaptureFixture[str]
) -> None:
    """A loader of a DDP script: 8 samples on each of 2 ranks are a global batch of 16."""
    sampler = DistributedSampler(SET, num_replicas=2, rank=1, shuffle=False)
    loader = DataLoader(SET, batch_size=8, sampler=sampler, generator=torch.Generator())
    assert batches(session, loader) == batches(session, SET, batch=16, shuffle=False)
    told = capfd.readouterr().err
    assert "of the DataLoader is not used: its DistributedSampler, since a session deals out the samples" in told
    assert "its generator, since the order is of the session's seed" in told


def take(session: samestep.Session, samples: Any, **values: Any) -> tuple[list[float], dict[str, Any]]:
    """The losses of a loop, and its metrics."""
    torch.manual_seed(0)
    model: nn.Module = nn.Linear(4, 3)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = session.prepare(model, optimizer)

    def loss(output: Tensor, batch: samestep.Batch) -> tuple[Tensor, int]:
        return nn.functional.cross_entropy(output, batch.targets, reduction="sum"), len(output)

    losses = [session.step(batch, loss).loss for batch in session.batches(samples, **values)]
    from torchmetrics.classification import MulticlassAccuracy

    metrics = {"accuracy": MulticlassAccuracy(3, average="micro")}
    values.pop("shuffle", None)
    return [float(loss) for loss in losses], session.evaluate(samples, metrics=metrics, **values)


def test_a_loop_takes_the_steps_of_the_loaders_data() -> None:
    loader = DataLoader(SET, batch_size=16, num_workers=1)
    with samestep.session(layout="single", device="cpu", threads=1) as session:
        losses, metrics = take(session, loader)
    with samestep.session(layout="single", device="cpu", threads=1) as session:
        assert take(session, SET, batch=16, shuffle=False) == (losses, metrics)
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, (points, labels) in enumerate(DataLoader(SET, batch_size=16)):
        value = nn.functional.cross_entropy(model(points), labels)
        assert losses[step] == pytest.approx(value.item(), rel=1e-6)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()


def test_a_mapping_is_the_models_inputs(session: samestep.Session) -> None:
    (batch,) = session.batches(DataLoader(Rows(), batch_size=41))
    inputs, targets = batch.micro_batches[0].batch
    assert inputs.keys() == {"point", "label"}
    assert targets is None


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "twice": (DataLoader(SET, batch_size=4), {"batch": 4}, "batch= and a DataLoader are given, which says it too"),
    "nothing": (SET, {}, "batch= is missing; give the number of samples of a global batch, or a DataLoader"),
    "no batches": (DataLoader(SET, batch_size=None), {}, "has batch_size=None; use the number of samples"),
    "weights": (
        DataLoader(SET, sampler=WeightedRandomSampler([1.0] * 41, 41)),
        {},
        "WeightedRandomSampler chooses samples in a way of its own",
    ),
    "replacement": (DataLoader(SET, sampler=RandomSampler(SET, replacement=True)), {}, "RandomSampler chooses"),
    "fewer": (DataLoader(SET, sampler=RandomSampler(SET, num_samples=7)), {}, "RandomSampler chooses"),
    "batches of its own": (
        DataLoader(SET, batch_sampler=OwnBatches(SequentialSampler(SET), 4, False)),
        {},
        "a batch sampler of its own, a OwnBatches",
    ),
    "a stream": (DataLoader(Endless(), batch_size=4), {}, "can only be read from front to back"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_can_not_be_dealt_out_is_refused(name: str, session: samestep.Session) -> None:
    loader, values, message = REFUSED[name]
    with pytest.raises(samestep.UserError) as refused:
        session.batches(loader, **values)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


ADVICE: dict[str, tuple[Any, dict[str, Any]]] = {
    "twice": (SET, {"batch": 4}),
    "weights": (DataLoader(SET, batch_size=4, shuffle=True), {}),
    "fewer": (DataLoader(Subset(SET, range(7)), batch_size=4, shuffle=True), {}),
    "batches of its own": (DataLoader(SET, batch_size=4), {"lengths": [1] * 41}),
    "a stream": (list(Endless()), {"batch": 4}),
}


@pytest.mark.parametrize("name", ADVICE)
def test_the_advice_helps(name: str, session: samestep.Session) -> None:
    samples, values = ADVICE[name]
    assert len(session.batches(samples, **values)) >= 2


def test_samples_are_stacked_without_a_collate() -> None:
    parts = dealt_parts(SET, "here", batch=4, collate=None)
    points, labels = parts.collate([SET[0], SET[1]])
    assert points.shape == (2, 4)
    assert labels.shape == (2,)
