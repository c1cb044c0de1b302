"""A fault in any single file operation of a save or a resume, and crashes that lose or reorder unsynced writes.

A training under faults (tests/file_faults.py) must end as the undisturbed one, to the bit, at once or once it is
resumed. Every n-th operation is tried here; all of them are marked slow.
"""

import errno
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from file_faults import STEPS, Case, FaultyTrainings, Outcome, shim
from lost_writes import Disk, operations_in

from samestep.checkpoint.folder import fault_of, read_info
from samestep.errors import CheckpointError
from samestep.run_folder import CHECKPOINTS, MODEL_FILE, candidates

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")

_EACH = 120  # every how many operations a fast test tries


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyTrainings]:
    place = tmp_path_factory.mktemp("shim")
    with FaultyTrainings(shim(place), place / "errors") as trainings:
        yield trainings


class Undisturbed:
    """A training without faults: its weights, how many operations it takes, and its state half-way."""

    def __init__(self, trainings: FaultyTrainings, place: Path) -> None:
        self.trainings = trainings
        self.record = place / "operations"
        self.folder, self.half = place / "undisturbed", place / "half"
        cases = [
            Case(folder=str(self.folder), record=str(self.record)),
            Case(folder=str(place / "counted")),
            Case(folder=str(self.half), steps=STEPS - 1),
            Case(folder=str(place / "resumed"), copy_of=str(self.half)),
        ]
        outcomes = trainings.run(cases)
        assert [outcome.code for outcome in outcomes] == [0, 0, 0, 0], outcomes
        _, self.operations, _, self.resumed_operations = (outcome.operations for outcome in outcomes)
        self.weights = (self.folder / MODEL_FILE).read_bytes()
        assert (place / "resumed" / MODEL_FILE).read_bytes() == self.weights


@pytest.fixture(scope="module")
def undisturbed(trainings: FaultyTrainings, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return Undisturbed(trainings, tmp_path_factory.mktemp("trained"))


def check_complete(folder: Path) -> None:
    """Every folder with a checkpoint's name is one, to the last byte."""
    for path in candidates(folder):
        assert fault_of(path, read_info(path).files) is None


def try_all(
    undisturbed: Undisturbed,
    place: Path,
    *,
    kind: str,
    error: int = 0,
    every: int,
    times: int = 1,
    resumed: bool = False,
) -> Iterator[tuple[Case, Outcome]]:
    """Try a fault in every `every`-th operation; each training that ended is started again, and must end right."""
    total = undisturbed.resumed_operations if resumed else undisturbed.operations
    half = str(undisturbed.half) if resumed else ""
    numbers = range(random.Random(f"{kind} {error} {resumed}").randrange(every), total, every)
    faulty = [
        Case(folder=str(place / f"{at}"), kind=kind, error=error, at=at, times=times, copy_of=half) for at in numbers
    ]
    again = [Case(folder=case.folder) for case in faulty]
    cases = [case for pair in zip(faulty, again, strict=True) for case in pair]
    outcomes = undisturbed.trainings.run(cases)
    assert len(outcomes) == len(cases)
    for case, first, second in zip(faulty, outcomes[::2], outcomes[1::2], strict=True):
        folder = Path(case.folder)
        assert second.code == 0, (case, first, second)
        check_complete(folder)
        assert (folder / MODEL_FILE).read_bytes() == undisturbed.weights, case
        assert not list((folder / CHECKPOINTS).glob("*.saving")), case
        yield case, first


def kills(undisturbed: Undisturbed, place: Path, *, every: int) -> None:
    for resumed in (False, True):
        tried = list(try_all(undisturbed, place / f"{resumed}", kind="kill", every=every, resumed=resumed))
        assert all(outcome.code == -9 for _, outcome in tried)


def test_a_kill_before_an_operation(undisturbed: Undisturbed, tmp_path: Path) -> None:
    kills(undisturbed, tmp_path, every=_EACH)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_kill_before_every_operation(undisturbed: Undisturbed, tmp_path: Path) -> None:
    kills(undisturbed, tmp_path, every=1)


def short_writes(undisturbed: Undisturbed, place: Path, *, every: int) -> None:
    tried = try_all(undisturbed, place, kind="short", every=every)
    assert all(outcome.code == 0 for _, outcome in tried)


def test_a_short_write_or_read(undisturbed: Undisturbed, tmp_path: Path) -> None:
    short_writes(undisturbed, tmp_path, every=_EACH)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_short_write_or_read(undisturbed: Undisturbed, tmp_path: Path) -> None:
    short_writes(undisturbed, tmp_path, every=1)


def errors(
    undisturbed: Undisturbed,
    place: Path,
    *,
    number: int,
    every: int,
) -> None:
    for resumed in (False, True):
        for case, outcome in try_all(
            undisturbed, place / f"{resumed}", kind="error", error=number, every=every, resumed=resumed
        ):
            if outcome.code == 0:
                continue
            # One sentence of a user's, from before the first step; nothing that has begun to train ends so.
            assert outcome.error.startswith(("UserError: ", "CheckpointError: ")), (case, outcome)


ERRORS = {"EIO": errno.EIO, "ENOSPC": errno.ENOSPC}


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_of_an_operation(name: str, undisturbed: Undisturbed, tmp_path: Path) -> None:
    errors(undisturbed, tmp_path, number=ERRORS[name], every=_EACH)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ERRORS)
def test_an_error_of_every_operation(name: str, undisturbed: Undisturbed, tmp_path: Path) -> None:
    errors(undisturbed, tmp_path, number=ERRORS[name], every=1)


def intact_step(run: Path) -> int:
    """The step of the checkpoint that a resume takes; -1 if there is none."""
    for path in candidates(run):
        try:
            info = read_info(path)
        except CheckpointError:
            continue
        if fault_of(path, info.files) is None:
            return info.step
    return -1


def lost_writes(undisturbed: Undisturbed, place: Path, *, crashes: int) -> None:
    """Crash after each operation: a checkpoint that was made durable is there, or a later one."""
    disk = Disk(str(undisturbed.folder.parent))
    durable = -1
    choose = random.Random(11)
    checkpoints = str(undisturbed.folder / CHECKPOINTS)
    renamed = -1
    for number, operation in enumerate(operations_in(undisturbed.record)):
        disk.take(operation)
        if operation.what == "rename" and operation.other.startswith(f"{checkpoints}/step-"):
            name = Path(operation.other).name
            renamed = int(name[5:]) if name[5:].isdigit() else renamed
        if operation.what == "sync" and operation.path == checkpoints:
            durable = renamed  # the saver says that it is safe now
        for crash in range(crashes):
            left = place / f"{number}-{crash}"
            left.mkdir(parents=True)
            disk.crash(choose, (0.0, 0.5, 0.9, 1.0)[(number + crash) % 4], left)
            step = intact_step(left / undisturbed.folder.name)
            assert step >= durable, (number, operation.what, operation.path, crash)
            shutil.rmtree(left)
    assert durable == STEPS


def test_crashes_that_lose_or_reorder_writes(undisturbed: Undisturbed, tmp_path: Path) -> None:
    lost_writes(undisturbed, tmp_path, crashes=4)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_crashes_that_lose_or_reorder_writes(undisturbed: Undisturbed, tmp_path: Path) -> None:
    lost_writes(undisturbed, tmp_path, crashes=200)
