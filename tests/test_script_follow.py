"""`samestep verify --script`: a run alone on the split run's batches, and what is wrong with the order of those."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import script_records as records
import torch
from script_records import Record, Step
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from samestep.recording.store import RecordWriter
from samestep.script_proof.batches import Batches, iterations
from samestep.script_proof.compare import compare_runs
from samestep.script_proof.follow import Following, following

GRADIENTS, MOVED = records.weights(1), records.weights(2)
ROWS = "abcdefghijklmnop"


def record(batches: Sequence[Sequence[Sequence[int]]], *, size: int = 16, ended: bool = False) -> Record:
    """A rank that has trained on these samples of a data set, epoch by epoch, a batch a step."""
    steps = [
        Step(rows=[ROWS[index] for index in batch], gradients=GRADIENTS, after=MOVED)
        for epoch in batches
        for batch in epoch
    ]
    return Record(steps=steps, before=records.weights(0), iterations=batches, size=size, iterations_end=ended)


def test_batches_of_a_rank_are_joined_into_those_of_the_run_alone(tmp_path: Path) -> None:
    records.write(tmp_path / "split", [record([[[0, 2], [4, 6]]]), record([[[1, 3], [5]]])])
    found = iterations(tmp_path / "split")
    assert found[0].joined == [[0, 2, 1, 3], [4, 6, 5]]
    assert not found[0].ended


def test_a_batch_of_each_rank_makes_the_one_of_the_run_alone_as_many_times_as_large(tmp_path: Path) -> None:
    folder = records.runs(
        tmp_path,
        alone=record([[[0, 1], [2, 3]]]),
        split=[record([[[0, 2], [4, 6]]]), record([[[1, 3], [5, 7]]])],
    )
    split = str(folder / "split")
    assert following(folder / "alone", folder / "split") == Following(folder=split, times=2, widened=(0,))


@pytest.mark.parametrize(
    ("alone", "split", "size"),
    [
        ([[[0, 1, 2, 3]]], [[[[0, 2]]], [[[1, 3]]]], 16),  # the same samples in each step
        ([[[0, 1]]], [[[[0, 2]]], [[[1, 3]]]], 12),  # another data set
    ],
)
def test_what_can_be_compared_as_it_is_or_has_another_data_set_is_not_followed(
    tmp_path: Path, alone: list[list[list[int]]], split: list[list[list[list[int]]]], size: int
) -> None:
    ranks = [record(rank, size=size) for rank in split]
    folder = records.runs(tmp_path, alone=record(alone), split=ranks)
    assert following(folder / "alone", folder / "split") is None


def test_a_loader_gives_the_batches_of_another_run_and_has_its_length(tmp_path: Path) -> None:
    records.write(tmp_path / "split", [record([[[6, 7], [2, 3]]]), record([[[0, 1], [4, 5]]])])
    data = list(range(8))
    own = DataLoader(data, batch_size=2)  # pyright: ignore[reportArgumentType]
    with closing(RecordWriter(tmp_path / "rank-0")) as writer:
        batches = Batches(writer, from_run=tmp_path / "split", times=2, made=(0,))
        batches.loader_made(own)
        given = list(batches.iterator_made(iter(BatchSampler(SequentialSampler(data), 2, False)), own))
        # A second pass was not seen in the other run: it goes as the script has it.
        assert next(batches.iterator_made(iter([[3, 1]]), own)) == [3, 1]
    assert given == [[6, 7, 0, 1], [2, 3, 4, 5]]
    assert len(own) == 2
    assert own.batch_size == 2  # what the script reads of it stays as it was


def test_random_numbers_are_drawn_as_the_own_order_would_draw_them(tmp_path: Path) -> None:
    records.write(tmp_path / "split", [record([[[6, 7]]])])
    after = []
    for given in (None, tmp_path / "split"):
        torch.manual_seed(0)
        loader = DataLoader(list(range(8)), batch_size=2, shuffle=True)  # pyright: ignore[reportArgumentType]
        with closing(RecordWriter(tmp_path / f"{given is None}")) as writer:
            batches = Batches(writer, from_run=given, times=1, made=())
            next(batches.iterator_made(iter(loader.batch_sampler), loader))  # pyright: ignore[reportArgumentType, reportCallIssue]
        after.append(torch.rand(1))
    assert after[0].equal(after[1])


FOUR = [[0, 1, 2, 3], [4, 5, 6, 7]]  # what the run alone takes of itself, in steps as large as those of the ranks


@pytest.mark.parametrize(
    ("split", "own", "ended", "kind", "step"),
    [
        ([[[[0, 1], [4, 5]]], [[[2, 3], [6, 7]]]], [FOUR], False, None, None),
        ([[[[0, 1], [4, 5]]], [[[2, 3], [6, 1]]]], [FOUR], False, "repeated-samples", 2),
        ([[[[0, 1], [4, 5]]], [[[2, 3], [6, 0]]]], [FOUR], True, "padded-sampler", 2),
        ([[[[0, 1], [4, 5]]], [[[2, 3], [6, 0]]]], [[[0, 0, 2, 3]]], True, None, None),  # drawn with replacement
        ([[[[0, 1], [4, 5]]] * 2, [[[2, 3], [6, 7]]] * 2], [FOUR, FOUR[::-1]], False, "same-order-each-epoch", 3),
        ([[[[0, 1], [4, 5]]] * 2, [[[2, 3], [6, 7]]] * 2], [FOUR, FOUR], False, None, None),  # alone as well
    ],
)
def test_the_order_of_the_split_run_is_judged_by_itself(
    tmp_path: Path,
    split: list[list[list[list[int]]]],
    own: list[list[list[int]]],
    ended: bool,
    kind: str | None,
    step: int | None,
) -> None:
    epochs = [[list(batch) for batch in zip(*(rank[at] for rank in split), strict=True)] for at in range(len(own))]
    given = [[[index for part in batch for index in part] for batch in epoch] for epoch in epochs]
    folder = records.runs(tmp_path, alone=record(given), split=[record(rank, ended=ended) for rank in split])
    records.write(folder / "alone-own", [record(own)])
    found = compare_runs(folder)
    assert (found.finding.kind if found.finding else None) == kind
    assert (found.finding.step if found.finding else None) == step
    assert any("it was given those of the split run" in note.en for note in found.notes)


@pytest.mark.parametrize(("own", "follows"), [([0.1, 0.2, 0.3, 0.4], True), ([0.1, 0.1, 0.1, 0.1], False)])
def test_a_schedule_that_follows_samples_is_said(tmp_path: Path, own: list[float], follows: bool) -> None:
    def with_rates(each: Record, rates: list[float]) -> Record:
        steps = [replace(step, lr=rate) for step, rate in zip(each.steps, rates, strict=True)]
        return replace(each, steps=steps)

    halves = [[[0], [2], [4], [6]]], [[[1], [3], [5], [7]]]
    whole = [[[0, 1], [2, 3], [4, 5], [6, 7]]]
    folder = records.runs(
        tmp_path,
        alone=with_rates(record(whole), [0.1, 0.2, 0.3, 0.4]),
        split=[with_rates(record(half), [0.1, 0.3, 0.5, 0.7]) for half in halves],
    )
    records.write(folder / "alone-own", [with_rates(record([[[0], [1], [2], [3]]]), own)])
    found = compare_runs(folder)
    assert found.finding is not None
    assert (found.finding.kind, found.finding.step) == ("schedule-steps", 2)
    assert any("the schedule follows samples" in note.en for note in found.notes) is follows
