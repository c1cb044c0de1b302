"""Sample order and Loader: the same samples at the same step, however many ranks and micro-batches there are."""

import gc
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from transformers import BatchEncoding

from samestep.data.loader import Chunks, Loader, StepBatch, to_device
from samestep.data.order import DataPlace, SampleOrder, Share
from samestep.data.types import Batch
from samestep.errors import UserError
from samestep.tasks.base import Task

pytestmark = pytest.mark.quick

CPU = torch.device("cpu")
ORDERS = st.builds(
    SampleOrder,
    size=st.integers(1, 60),
    batch=st.integers(1, 70),
    seed=st.integers(0, 2**32 - 1),
    shuffle=st.booleans(),
)
RANKS = st.integers(1, 9)
MICRO_BATCHES = st.none() | st.integers(1, 12)
STEPS = st.integers(0, 40)


def own(shares: Sequence[Share]) -> list[int]:
    """The samples of a rank that have a weight, in their order."""
    return [int(sample) for share in shares if not share.zero_weight for sample in share.samples]


@given(order=ORDERS, ranks=RANKS, micro_batch=MICRO_BATCHES, step=STEPS)
def test_the_ranks_micro_batches_make_exactly_the_global_batch_in_order(
    order: SampleOrder, ranks: int, micro_batch: int | None, step: int
) -> None:
    by_rank = [order.shares(step, DataPlace(index=rank, of=ranks), micro_batch) for rank in range(ranks)]
    assert [sample for shares in by_rank for sample in own(shares)] == order.global_batch(step).tolist()


@given(order=ORDERS, ranks=RANKS, micro_batch=MICRO_BATCHES, step=STEPS)
def test_every_rank_has_as_many_micro_batches_and_none_is_empty_or_too_large(
    order: SampleOrder, ranks: int, micro_batch: int | None, step: int
) -> None:
    by_rank = [order.shares(step, DataPlace(index=rank, of=ranks), micro_batch) for rank in range(ranks)]
    largest = micro_batch or order.batch
    assert len({len(shares) for shares in by_rank}) == 1
    assert all(1 <= len(share.samples) <= largest for shares in by_rank for share in shares)
    counts = [len(own(shares)) for shares in by_rank]
    assert max(counts) - min(counts) <= 1
    # No more forwards than the fullest rank needs.
    assert len(by_rank[0]) == len(range(0, max(counts), micro_batch or max(counts)))


@given(order=ORDERS, ranks=RANKS, micro_batch=MICRO_BATCHES, step=STEPS, seed=st.integers(0, 100))
def test_by_length_it_is_the_same_global_batch_and_ranks_have_alike_shares(
    order: SampleOrder, ranks: int, micro_batch: int | None, step: int, seed: int
) -> None:
    lengths = np.random.default_rng(seed).integers(1, 100, order.size)
    grouped = replace(order, lengths=lengths)
    assert np.array_equal(grouped.global_batch(step), order.global_batch(step))
    by_rank = [grouped.shares(step, DataPlace(index=rank, of=ranks), micro_batch) for rank in range(ranks)]
    assert Counter(sample for shares in by_rank for sample in own(shares)) == Counter(
        order.global_batch(step).tolist()
    )
    assert [len(shares) for shares in by_rank] == [
        len(order.shares(step, DataPlace(index=rank, of=ranks), micro_batch)) for rank in range(ranks)
    ]
    each = [[int(lengths[sample]) for sample in own(shares)] for shares in by_rank]
    assert all(rank == sorted(rank, reverse=True) for rank in each)
    # Dealt out in turn: whatever a rank's number in the row, its neighbour's is as long or the next shorter one.
    assert all(a >= b for first, second in pairwise(each) for a, b in zip(first, second, strict=False))
    assert all(b >= a for first, second in pairwise(each) for a, b in zip(first[1:], second, strict=False))


def test_micro_batches_of_like_lengths_have_less_padding() -> None:
    lengths = np.random.default_rng(0).geometric(0.03, 640)
    orders = [SampleOrder(size=640, batch=64, seed=0, lengths=given) for given in (None, lengths)]

    def padded(order: SampleOrder) -> int:
        shares = [order.shares(step, DataPlace(index=rank, of=2), 8) for step in range(10) for rank in range(2)]
        return sum(len(each.samples) * int(lengths[each.samples].max()) for share in shares for each in share)

    apart, together = (padded(order) for order in orders)
    assert together - lengths.sum() < 0.5 * (apart - lengths.sum())


@given(order=ORDERS, ranks=RANKS, micro_batch=MICRO_BATCHES, step=STEPS)
def test_only_a_rank_without_a_sample_left_has_a_zero_weight_one_of_the_batch(
    order: SampleOrder, ranks: int, micro_batch: int | None, step: int
) -> None:
    batch = order.global_batch(step).tolist()
    for rank in range(ranks):
        shares = order.shares(step, DataPlace(index=rank, of=ranks), micro_batch)
        weightless = [share for share in shares if share.zero_weight]
        assert all(share.samples.tolist() == [batch[0]] for share in weightless)
        if weightless:  # the others hold one sample each: there were fewer samples than micro-batches
            assert all(len(share.samples) == 1 for share in shares)


@given(order=ORDERS, epoch=st.integers(0, 3))
def test_an_epoch_holds_every_sample_once(order: SampleOrder, epoch: int) -> None:
    steps = range(epoch * order.steps_per_epoch, (epoch + 1) * order.steps_per_epoch)
    batches = [order.global_batch(step).tolist() for step in steps]
    assert Counter(sample for batch in batches for sample in batch) == Counter(range(order.size))
    assert {order.epoch_of(step) for step in steps} == {epoch}


@given(order=ORDERS, epoch=st.integers(0, 3))
def test_only_the_last_batch_of_an_epoch_is_smaller_and_holds_what_is_left(order: SampleOrder, epoch: int) -> None:
    steps = range(epoch * order.steps_per_epoch, (epoch + 1) * order.steps_per_epoch)
    *full, last = [len(order.global_batch(step)) for step in steps]
    assert full == [order.batch] * len(full)
    assert last == order.size - sum(full)
    assert 1 <= last <= order.batch


@given(seed=st.integers(0, 2**32 - 1), other=st.integers(0, 2**32 - 1), epoch=st.integers(0, 5))
def test_seeds_and_epochs_give_orders_of_their_own(seed: int, other: int, epoch: int) -> None:
    def epoch_order(seed: int, epoch: int) -> list[int]:
        return SampleOrder(size=50, batch=50, seed=seed).global_batch(epoch).tolist()

    assert epoch_order(seed, epoch) == epoch_order(seed, epoch)
    assert epoch_order(seed, epoch) != epoch_order(seed, epoch + 1)
    assert (epoch_order(seed, epoch) == epoch_order(other, epoch)) == (seed == other)


def test_the_order_of_a_seed_never_changes() -> None:
    """A checkpoint from the middle of an epoch goes on with what is left of this very order."""
    orders = [SampleOrder(size=10, batch=10, seed=seed).global_batch(epoch).tolist() for seed, epoch in KNOWN]
    assert orders == list(KNOWN.values())


# (seed, epoch) -> order, as they were on the day the order was fixed.
KNOWN = {
    (7, 0): [0, 8, 5, 2, 3, 4, 9, 7, 6, 1],
    (7, 1): [9, 8, 2, 0, 3, 5, 6, 4, 7, 1],
    (2**32 - 1, 0): [7, 8, 3, 4, 5, 1, 6, 9, 0, 2],
}


def test_without_shuffling_the_order_is_that_of_the_data_set() -> None:
    order = SampleOrder(size=7, batch=3, seed=1, shuffle=False)
    assert [order.global_batch(step).tolist() for step in range(4)] == [[0, 1, 2], [3, 4, 5], [6], [0, 1, 2]]


def test_an_empty_data_set_is_refused() -> None:
    with pytest.raises(UserError, match="the data set is empty; at least one sample is needed"):
        SampleOrder(size=0, batch=4, seed=0)


class Numbers:
    """A data set whose sample is its index."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int, /) -> tuple[float, int]:
        return float(index), index


def collate(samples: Sequence[tuple[float, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = zip(*samples, strict=True)
    return torch.tensor(inputs, dtype=torch.float32), torch.tensor(targets)


def loader(order: SampleOrder, start: int, stop: int, **options: Any) -> Loader:
    options = {"place": DataPlace(), "device": CPU, "dtype": torch.float32} | options
    return Loader(Numbers(order.size), collate, order, start=start, stop=stop, **options)  # pyright: ignore[reportArgumentType]


def content(steps: Sequence[StepBatch]) -> list[Any]:
    """What a loader gave, without how long it took."""
    return [
        (
            step.step,
            step.epoch,
            step.global_samples,
            [(m.batch.inputs.tolist(), m.batch.targets.tolist(), m.samples, m.weight) for m in step.micro_batches],
        )
        for step in steps
    ]


@given(order=ORDERS, ranks=RANKS, micro_batch=MICRO_BATCHES, start=st.integers(0, 8))
def test_a_loader_gives_each_rank_its_shares_and_the_ranks_together_the_batch(
    order: SampleOrder, ranks: int, micro_batch: int | None, start: int
) -> None:
    stop = start + 3
    by_rank = [
        list(loader(order, start, stop, place=DataPlace(index=rank, of=ranks), micro_batch=micro_batch))
        for rank in range(ranks)
    ]
    for offset, steps in enumerate(zip(*by_rank, strict=True)):
        batch = order.global_batch(start + offset)
        assert {step.step for step in steps} == {start + offset}
        assert {step.epoch for step in steps} == {(start + offset) // order.steps_per_epoch}
        assert {step.global_samples for step in steps} == {len(batch)}
        assert sum(step.local_samples for step in steps) == len(batch)
        parts = [part for step in steps for part in step.micro_batches]
        assert {(part.weight, part.samples > 0) for part in parts} <= {(1.0, True), (0.0, False)}
        given_out = [part.batch for part in parts if part.weight]
        assert torch.cat([part.targets for part in given_out]).tolist() == batch.tolist()
        assert torch.cat([part.inputs for part in given_out]).tolist() == batch.tolist()


@given(order=ORDERS, micro_batch=MICRO_BATCHES, start=st.integers(0, 6))
def test_a_loader_started_again_at_any_step_gives_the_same_rest(
    order: SampleOrder, micro_batch: int | None, start: int
) -> None:
    place = DataPlace(index=1, of=3)
    whole = loader(order, 0, 8, place=place, micro_batch=micro_batch)
    rest = loader(order, start, 8, place=place, micro_batch=micro_batch)
    assert content(list(rest)) == content(list(whole))[start:]
    assert (len(whole), len(rest)) == (8, 8 - start)


@pytest.mark.processes
def test_worker_processes_give_the_same_as_none() -> None:
    order = SampleOrder(size=23, batch=8, seed=3)
    place = DataPlace(index=2, of=3)
    alone = loader(order, 2, 9, place=place, micro_batch=2)
    helped = loader(order, 2, 9, place=place, micro_batch=2, workers=2)
    assert content(list(helped)) == content(list(alone))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.processes
def test_iterating_leaves_the_random_states_as_they_were(workers: int) -> None:
    def drawn() -> tuple[Any, ...]:
        """What each global source of randomness would give next."""
        states = torch.get_rng_state(), np.random.get_state(), random.getstate()
        numbers = torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random()
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
        return numbers

    before = drawn()
    list(loader(SampleOrder(size=9, batch=4, seed=5), 0, 5, workers=workers))
    assert drawn() == before


class Collects:
    """Samples whose process looks for garbage before each."""

    def __len__(self) -> int:
        return 9

    def __getitem__(self, number: int) -> tuple[float, int]:
        gc.collect()
        return float(number), number


class Held:
    """A group and what refers to it, each to the other."""

    def __init__(self) -> None:
        self.itself = self
        self.group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1)  # pyright: ignore[reportCallIssue]
        self.group.allreduce([torch.ones(1)]).wait()  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(60)
def test_loading_processes_inherit_no_garbage_that_waits_for_threads() -> None:
    options: dict[str, Any] = {"device": CPU, "dtype": torch.float32, "workers": 2}
    gc.disable()
    try:
        Held()  # garbage that is not collected yet
        order = SampleOrder(size=9, batch=4, seed=5)
        steps = Loader(Collects(), collate, order, place=DataPlace(), start=0, stop=2, **options)  # pyright: ignore[reportArgumentType]
        assert len(list(steps)) == 2
        Held()
        chunks = Chunks(Collects(), collate, size=3, place=DataPlace(), **options)  # pyright: ignore[reportArgumentType]
        assert len(list(chunks)) == 3
    finally:
        gc.enable()


def test_a_loader_can_be_iterated_again() -> None:
    steps = loader(SampleOrder(size=9, batch=4, seed=5), 1, 5)
    assert content(list(steps)) == content(list(steps))


class Pair(NamedTuple):
    first: torch.Tensor
    second: Any


def test_every_tensor_of_a_nest_moves_and_only_floating_ones_take_the_dtype() -> None:
    nest = {
        "tokens": torch.arange(3),
        "mask": torch.tensor([True]),
        "parts": [torch.ones(2), (torch.ones(1), "text", None)],
        "pair": Pair(torch.ones(2, dtype=torch.float16), {"deep": torch.zeros(1)}),
        "encoded": BatchEncoding({"input_ids": torch.ones(2, dtype=torch.int32)}),
    }
    moved = to_device(nest, torch.device("meta"), torch.float64)
    wanted = {
        "tokens": torch.int64,
        "mask": torch.bool,
        "parts": [torch.float64, (torch.float64, "text", None)],
        "pair": Pair(torch.float64, {"deep": torch.float64}),  # pyright: ignore[reportArgumentType]
        "encoded": {"input_ids": torch.int32},
    }
    assert dtypes_on(moved, "meta") == wanted
    assert isinstance(moved["pair"], Pair)
    assert dtypes_on(nest["tokens"], "cpu") == torch.int64  # the nest itself is left alone


def dtypes_on(value: Any, device: str) -> Any:
    """The nest with each tensor replaced by its dtype, or by its device where that is another one."""
    if isinstance(value, torch.Tensor):
        return value.dtype if value.device.type == device else value.device
    if isinstance(value, dict):
        return {key: dtypes_on(inner, device) for key, inner in value.items()}
    if isinstance(value, Pair):
        return Pair(*(dtypes_on(inner, device) for inner in value))
    if isinstance(value, (list, tuple)):
        return type(value)(dtypes_on(inner, device) for inner in value)
    return value


def test_a_loader_gives_batches_in_the_dtype_of_the_parameters() -> None:
    (step,) = loader(SampleOrder(size=4, batch=4, seed=0), 0, 1, dtype=torch.float64)
    (part,) = step.micro_batches
    assert (part.batch.inputs.dtype, part.batch.targets.dtype) == (torch.float64, torch.int64)


@given(samples=st.integers(0, 40), size=st.integers(1, 12), ranks=RANKS)
def test_chunks_hold_every_sample_once_and_the_same_ones_together_for_any_ranks(
    samples: int, size: int, ranks: int
) -> None:
    by_rank = [
        list(
            Chunks(
                Numbers(samples),
                collate,  # pyright: ignore[reportArgumentType]
                size=size,
                place=DataPlace(index=rank, of=ranks),
                device=CPU,
                dtype=torch.float32,
            )
        )
        for rank in range(ranks)
    ]
    assert len({len(chunks) for chunks in by_rank}) == 1
    together = [chunk.batch.targets.tolist() for chunks in by_rank for chunk in chunks if not chunk.zero_weight]
    everything = list(range(samples))
    assert sorted(together) == [everything[start : start + size] for start in range(0, samples, size)]


class Plain(Task):
    """A task with nothing of its own but what it must have."""

    def model(self) -> torch.nn.Module:
        return torch.nn.Identity()

    def train_set(self) -> Numbers:
        return Numbers(1)

    def loss(self, output: Any, batch: Batch) -> tuple[torch.Tensor, int]:
        return output.sum(), len(output)


def test_the_default_collate_stacks_pairs() -> None:
    batch = Plain().collate([(torch.tensor([1.0, 2.0]), 3), (torch.tensor([4.0, 5.0]), 6)])
    assert batch.inputs.tolist() == [[1.0, 2.0], [4.0, 5.0]]
    assert batch.targets.tolist() == [3, 6]


def test_the_default_collate_keeps_inputs_of_several_parts_a_tuple() -> None:
    """A tuple is called as positions, a list as one argument; torch's own collate makes lists of tuples."""
    batch = Plain().collate([((1, 2), 0), ((3, 4), 1)])
    assert isinstance(batch.inputs, tuple)
    assert [part.tolist() for part in batch.inputs] == [[1, 3], [2, 4]]
