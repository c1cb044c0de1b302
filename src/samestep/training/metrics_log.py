"""metrics.jsonl and TensorBoard events of a training while it runs.

Rank 0 writes; each rank's count of samples is a line of its own, and their sum is the data set.
"""

import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch.distributed as dist

from samestep import file_errors
from samestep.data.loader import StepBatch
from samestep.errors import UserError
from samestep.extras import is_installed, need
from samestep.fault_tolerance.lease import Held
from samestep.fault_tolerance.nonfinite import without_nonfinite
from samestep.run_folder import EVALUATIONS_FILE, METRICS_FILE, json_lines
from samestep.training.evaluation import scalars

if TYPE_CHECKING:
    from samestep.training.board import Board

SKIPPED = "checkpoints_skipped"  # in a step's line and in the report: saves that were left out so far


class Tally:
    """Counts this rank's samples in the first epoch."""

    def __init__(self, data_set: int) -> None:
        self._data_set = data_set
        self._samples: list[int] = []

    def add(self, batch: StepBatch) -> None:
        """Count this rank's samples of a step, if it is in the first epoch."""
        if batch.epoch == 0:
            self._samples.append(batch.local_samples)

    def gather(self, group: dist.ProcessGroup) -> list[str]:
        """Gather the counts of a data group's ranks: a line for each rank, and one with the sum."""
        ranks = dist.get_process_group_ranks(group)
        counts: list[Any] = [None] * len(ranks)
        dist.all_gather_object(counts, self._samples, group=group)
        like = len({size for of_rank in counts for size in of_rank}) == 1
        lines = [
            f"rank {rank}: {_product(of_rank, len(counts)) if like else _sum(of_rank)}"
            for rank, of_rank in zip(ranks, counts, strict=True)
        ]
        total = sum(sum(of_rank) for of_rank in counts)
        return [*lines, f"all ranks: {total:,} of {self._data_set:,} samples in the first epoch"]


def _product(samples: Sequence[int], ranks: int) -> str:
    """The line of a rank if every rank takes the same number of samples in every step."""
    together = "1 rank" if ranks == 1 else f"{ranks} ranks"
    return f"{len(samples)} steps x {samples[0]} samples x {together} = {len(samples) * samples[0] * ranks:,}"


def _sum(samples: Sequence[int]) -> str:
    """A line such as "12 steps of 8 or 7 samples = 95"."""
    sizes = sorted(set(samples), reverse=True)
    return f"{len(samples)} steps of {' or '.join(map(str, sizes))} samples = {sum(samples):,}"


class PatientFile:
    """Appends lines to a file. Those that the system refuses are kept, and written as soon as it takes them.

    A training is worth more than its records: a full disk costs one warning, not the training.
    """

    _MOST = 1 << 24  # bytes that are kept

    def __init__(self, file: Path) -> None:
        self._path = file
        self._file = file.open("ab", buffering=0)
        self._kept = b""
        self._lost = 0  # lines
        self._refused = False

    def add(self, line: str) -> None:
        """Append a line, after those that are kept."""
        if len(self._kept) < self._MOST:
            self._kept += line.encode() + b"\n"
        else:
            self._lost += 1
        try:
            self._flush()
        except OSError as error:
            if not self._refused:
                self._refused = True
                reason = file_errors.reason_of(error, self._path.parent, elsewhere="use another run.folder")
                _warn(f"{self._path} can't be written: {reason}; the training goes on, its lines are kept for later")

    def _flush(self) -> None:
        if self._kept and not os.fstat(self._file.fileno()).st_nlink:
            if not self._path.parent.is_dir():
                return  # the lease of the run's folder tells of it
            file = self._path.open("ab", buffering=0)
            self._file.close()
            self._file = file
            _warn(f"{self._path} was removed while the training ran; what follows is in a new one")
        while self._kept:  # a disk that is nearly full takes a part of a line
            count = self._file.write(self._kept)
            self._kept = self._kept[count or 0 :]

    def close(self) -> None:
        """Write what is kept, as far as it can be, and close the file."""
        with suppress(OSError):
            self._flush()
        lost = self._lost + self._kept.count(b"\n")
        if lost:
            lines = "line" if lost == 1 else f"{lost:,} lines"
            _warn(f"{self._path} lacks its last {lines}, which can't be written")
        with suppress(OSError):  # a network's file system tells so late that it hasn't written
            self._file.close()


def _warn(text: str) -> None:
    print(f"samestep: {text}", file=sys.stderr, flush=True)


def writes_events(tensorboard: bool | None) -> bool:
    """Whether events for TensorBoard are written; raises UserError if they are asked for and it isn't installed."""
    if tensorboard:
        need("run.tensorboard: true", "tensorboard")
    return is_installed("tensorboard") if tensorboard is None else tensorboard


class Records:
    """Writes a line per step to metrics.jsonl and one per evaluation to evaluations.jsonl, and to TensorBoard.

    Raises UserError if the folder can't be written before the first step; later it warns, and the training goes on.
    """

    def __init__(
        self, folder: Path | None, *, first_step: int = 0, tensorboard: bool | None, held: Held | None = None
    ) -> None:
        """`held`: the lease of the folder, which is looked at now and then while steps are written."""
        self._held = held
        self._steps = self._evaluations = self._board = None
        self.losses: list[float] = []  # of steps before `first_step`, if the file has all of them
        self.skipped = 0  # saves that were left out before `first_step`
        if folder is None:
            return
        try:
            self._open(folder, first_step, tensorboard=tensorboard)
        except OSError as error:
            text = f"the run's records can't be written into {folder}: "
            text += file_errors.reason_of(error, folder, elsewhere="use another run.folder")
            if not first_step:
                raise UserError(text) from None
            _warn(f"{text}; the training goes on without them")

    def _open(self, folder: Path, first_step: int, *, tensorboard: bool | None) -> None:
        """Open the files, with the lines of the steps before `first_step`."""
        folder.mkdir(parents=True, exist_ok=True)
        metrics, evaluations = folder / METRICS_FILE, folder / EVALUATIONS_FILE
        kept = _lines_before(metrics, first_step)
        if [values["step"] for _, values in kept] == list(range(first_step)):
            self.losses = [math.nan if values["loss"] is None else values["loss"] for _, values in kept]
        self.skipped = max((int(values.get(SKIPPED, 0)) for _, values in kept), default=0)
        self._steps = _rewritten(metrics, [line for line, _ in kept])
        self._evaluations = _rewritten(evaluations, [line for line, _ in _lines_before(evaluations, first_step + 1)])
        if writes_events(tensorboard):
            from samestep.training.board import Board

            self._board = Board(folder / "tensorboard", purge_step=first_step or None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in (self._steps, self._evaluations):
            if file is not None:
                file.close()
        if self._board is not None:
            self._with_board(lambda board: board.close())

    def step(self, values: Mapping[str, Any]) -> None:
        """Write a step's line to metrics.jsonl and its values to TensorBoard. Raises LeaseLostError."""
        if self._held is not None and self._steps is not None:
            self._held.look()
        if self._steps is not None:
            self._steps.add(json.dumps(without_nonfinite(dict(values))))
        terms = {f"train/losses/{name}": value for name, value in values.get("losses", {}).items()}
        self._draw(values["step"], {f"train/{name}": values[name] for name in ("loss", "grad_norm", "lr")} | terms)

    def evaluation(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write an evaluation's scalar metrics to evaluations.jsonl and TensorBoard."""
        numbers = scalars(metrics)
        if self._evaluations is not None:
            self._evaluations.add(json.dumps(without_nonfinite({"step": step, **numbers})))
        self._draw(step, {f"evaluation/{name}": value for name, value in numbers.items()})

    def _draw(self, step: int, values: Mapping[str, float]) -> None:
        """Add the finite values to TensorBoard's curves."""
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        self._with_board(lambda board: board.draw(step, finite))

    def _with_board(self, act: Callable[["Board"], None]) -> None:
        """Write to TensorBoard's files, if they are written; after an error, warn and write no more of them."""
        if self._board is None:
            return
        try:
            act(self._board)
        except OSError as error:  # of an earlier value, since a thread of TensorBoard's writes
            self._board.leave()
            self._board = None
            _warn(f"TensorBoard's files can't be written: {error.strerror}; the training goes on without them")


def _lines_before(file: Path, step: int) -> list[tuple[str, dict[str, Any]]]:
    """The lines of steps before `step`, raw and parsed; skips the partial line of a run that was killed."""
    if not step:
        return []
    lines = json_lines(file)
    read = zip(lines.texts, lines.values, strict=True)
    return [(text, values) for text, values in read if values.get("step", step) < step]


def _rewritten(file: Path, lines: Sequence[str]) -> PatientFile:
    """Replace a file by one with these lines, and open it for appending.

    The replacement is atomic: a process that is killed here leaves the old file or the new one.
    """
    new = file.with_name(f"{file.name}.new")
    new.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    new.replace(file)
    return PatientFile(file)
