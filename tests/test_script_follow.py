"""`samestep verify --script`: a run alone on the split run's batches, and what is wrong with the order of those."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import script_records as records
import torch
from script_records import Record, Step
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from samestep.errors import UserError
from samestep.recording.store import RecordWriter
from samestep.script_proof.batches import Batches, iterations
from samestep.script_proof.compare import compare_runs, prove
from samestep.script_proof.follow import Following, following
from samestep.script_proof.runs import ScriptProof, ScriptStart, Starter
from samestep.subprocess_group import CommandOutcome

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


def test_a_schedule_that_follows_samples_to_an_early_end_is_not_excused(tmp_path: Path) -> None:
    def with_rates(each: Record, rates: list[float]) -> Record:
        steps = [replace(step, lr=rate) for step, rate in zip(each.steps, rates, strict=True)]
        return replace(each, steps=steps)

    halves = [[[0], [2], [4], [6]]], [[[1], [3], [5], [7]]]
    folder = records.runs(
        tmp_path,
        alone=with_rates(record([[[0, 1], [2, 3], [4, 5], [6, 7]]]), [0.4, 0.3, 0.2, 0.1]),
        split=[with_rates(record(half), [0.4, 0.2, 0.0, 0.0]) for half in halves],
    )
    records.write(folder / "alone-own", [with_rates(record([[[0], [1], [2], [3]]]), [0.4, 0.3, 0.2, 0.1])])
    notes = [note.en for note in compare_runs(folder).notes]
    assert any("learning rate is 0 from step 3 on" in note for note in notes)
    assert not any("the schedule follows samples" in note for note in notes)


def written(**runs: Sequence[Record]) -> Starter:
    """A starter that writes records in place of runs: of each name's starts the ranks, one after the other."""
    left = {name.replace("_", "-"): list(ranks) for name, ranks in runs.items()}

    def start(starts: Sequence[ScriptStart], proof: ScriptProof) -> list[CommandOutcome]:
        for each in starts:
            ranks = [left[each.name].pop(0) for _ in range(each.ranks)]
            records.write(each.place, ranks)
        return [CommandOutcome(code=0, seconds=0.0, output="") for _ in starts]

    return start


def at_rates(one: Record, rates: Sequence[float], *, end: str) -> Record:
    steps = [replace(step, lr=rate) for step, rate in zip(one.steps, rates, strict=True)]
    return replace(one, steps=steps, end=end)


@pytest.mark.parametrize(
    ("whole", "longer", "kind"),
    [
        (8, 8, "schedule-length"),  # of 16 samples over a rank's 2: the split run has half of the steps
        (4, 4, None),  # a set number of steps
    ],
)
def test_a_training_that_is_stopped_while_its_rate_goes_down_is_run_to_its_end(
    whole: int, longer: int, kind: str | None, tmp_path: Path
) -> None:
    rates = [1 - number / whole for number in range(whole)]
    small = [[2 * at, 2 * at + 1] for at in range(8)]
    ranks = [[[4 * at + rank, 4 * at + 2 + rank] for at in range(4)] for rank in range(2)]
    own = at_rates(record([small[:2]]), rates[:2], end="stopped")
    split = [at_rates(record([each[:2]]), rates[:2], end="stopped") for each in ranks]
    joined = at_rates(record([[[0, 2, 1, 3], [4, 6, 5, 7]]]), rates[:2], end="stopped")
    starter = written(
        alone=[own, joined],
        split=split,
        again=[joined],
        split_whole=[at_rates(record([each]), rates[:4], end="ended") for each in ranks],
        alone_whole=[at_rates(record([small[:longer]]), rates[:longer], end="ended")],
    )
    proof = ScriptProof(script=("train.py",), processes=2, steps=2)
    found = prove(proof, tmp_path, starter)
    assert (found.finding.kind if found.finding is not None else None) == kind


@pytest.mark.parametrize("exact", [True, False])
def test_a_small_difference_after_equal_outputs_is_checked_in_float64(exact: bool, tmp_path: Path) -> None:
    def run_of(rows: Sequence[str], moved: float, dtype: torch.dtype) -> Record:
        def of(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {name: value.to(dtype) for name, value in values.items()}

        gradients = of({name: value * (1 + moved * torch.sign(value)) for name, value in GRADIENTS.items()})
        step = Step(rows=rows, gradients=gradients, after=of(MOVED), outputs=(1.0,) * len(rows), shape=(3,))
        return Record(steps=[step], before=of(records.weights(0)))

    low, high = torch.float32, torch.float64
    rows = ["a", "b"]
    apart = 0.003 if exact else 0.0
    starter = written(
        alone=[run_of(rows, 0.0, low), run_of(rows, 0.0, high)],
        split=[
            *(run_of([row], 0.003, low) for row in rows),
            *(run_of([row], apart, high) for row in rows),
        ],
        again=[run_of(rows, 0.0, low), run_of(rows, 0.0, high)],
    )
    found = prove(ScriptProof(script=("train.py",), processes=2, steps=1), tmp_path, starter)
    assert (found.finding.kind if found.finding is not None else None) == ("backward-differs" if exact else None)
    assert any("in float64 the runs differ too" in note.en for note in found.notes) == exact


def test_a_script_that_takes_a_rank_for_each_accelerator_is_told_of_one_alone(tmp_path: Path) -> None:
    batches = [[[0, 1], [2, 3]]]
    devices = list[tuple[str, int]]()
    starter = written(
        alone=[record(batches)], again=[record(batches)], split=[record([[[at], [2 + at]]]) for at in (0, 1)]
    )

    def start(starts: Sequence[ScriptStart], proof: ScriptProof) -> Sequence[CommandOutcome]:
        devices.extend((each.name, each.settings.devices) for each in starts)
        if devices == [("alone", 2)]:
            return [CommandOutcome(code=1, seconds=0.0, output="2 devices, and 1 process")]
        return starter(starts, proof)

    found = prove(ScriptProof(script=("train.py",), processes=2, steps=2, on="cpu"), tmp_path, start)
    assert found.same_step
    assert devices == [("alone", 2), ("alone", 1), ("split", 2), ("again", 1)]
    assert any("was told of one for each of its ranks" in note.en for note in found.notes)

    def always(starts: Sequence[ScriptStart], proof: ScriptProof) -> Sequence[CommandOutcome]:
        return [CommandOutcome(code=1, seconds=0.0, output=f"{starts[0].settings.devices} devices") for _ in starts]

    with pytest.raises(UserError, match=r"2 devices\nIf it is told of 1 accelerator\(s\): 1 devices"):
        prove(ScriptProof(script=("train.py",), processes=2, on="cpu"), tmp_path / "fails", always)
