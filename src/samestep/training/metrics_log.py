"""metrics.jsonl of a training while it runs, and what its loggers get.

Rank 0 writes; each rank's count of samples is a line of its own, and their sum is the data set.
"""

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

import torch.distributed as dist

from samestep import environment, file_errors
from samestep.data.loader import StepBatch
from samestep.errors import UserError
from samestep.fault_tolerance.lease import Held
from samestep.fault_tolerance.nonfinite import without_nonfinite
from samestep.job import Log
from samestep.loggers.base import LoggedRun
from samestep.loggers.opened import OpenLoggers
from samestep.run_folder import EVALUATIONS_FILE, METRICS_FILE, json_lines
from samestep.training.evaluation import scalars

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


class Records:
    """Writes a line per step to metrics.jsonl and one per evaluation to evaluations.jsonl, and tells the loggers.

    Raises UserError if the folder can't be written before the first step; later it warns, and the training goes on.
    """

    def __init__(
        self,
        folder: Path | None,
        *,
        first_step: int = 0,
        log: Sequence[Log] | None,
        name: str = "samestep",
        config: Mapping[str, Any] = MappingProxyType({}),
        held: Held | None = None,
    ) -> None:
        """`folder`: the run's, on the rank that writes; None: on any other.

        `log`, `name` and `config`: the loggers, and what they are told of the run. `held`: the lease of the folder,
        which is looked at now and then while steps are written.
        """
        self._held = held
        self._steps = self._evaluations = self._loggers = None
        self.losses: list[float] = []  # of steps before `first_step`, if the file has all of them
        self.skipped = 0  # saves that were left out before `first_step`
        if folder is None:
            return
        try:
            self._open(folder, first_step)
            environ = environment.snapshot()
            run = LoggedRun(folder=folder, name=name, config=config, environ=environ, first_step=first_step)
            self._loggers = OpenLoggers(log, run)
        except UserError:
            self._close()
            raise
        except OSError as error:
            text = f"the run's records can't be written into {folder}: "
            text += file_errors.reason_of(error, folder, elsewhere="use another run.folder")
            if not first_step:
                raise UserError(text) from None
            _warn(f"{text}; the training goes on without them")

    def _open(self, folder: Path, first_step: int) -> None:
        """Open the files, with the lines of the steps before `first_step`."""
        folder.mkdir(parents=True, exist_ok=True)
        metrics, evaluations = folder / METRICS_FILE, folder / EVALUATIONS_FILE
        kept = _lines_before(metrics, first_step)
        if [values["step"] for _, values in kept] == list(range(first_step)):
            self.losses = [math.nan if values["loss"] is None else values["loss"] for _, values in kept]
        self.skipped = max((int(values.get(SKIPPED, 0)) for _, values in kept), default=0)
        self._steps = _rewritten(metrics, [line for line, _ in kept])
        self._evaluations = _rewritten(evaluations, [line for line, _ in _lines_before(evaluations, first_step + 1)])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()
        if self._loggers is not None:
            self._loggers.close(failed=error is not None)

    def _close(self) -> None:
        for file in (self._steps, self._evaluations):
            if file is not None:
                file.close()

    def step(self, values: Mapping[str, Any]) -> None:
        """Write a step's line to metrics.jsonl, and tell the loggers its values. Raises LeaseLostError."""
        if self._held is not None and self._steps is not None:
            self._held.look()
        if self._steps is not None:
            self._steps.add(json.dumps(without_nonfinite(dict(values))))
        if self._loggers is not None:
            terms = {f"train/losses/{name}": value for name, value in values.get("losses", {}).items()}
            shown = {f"train/{name}": values[name] for name in ("loss", "grad_norm", "lr")}
            self._loggers.numbers(values["step"], shown | terms)

    def further(self, step: int, values: Mapping[str, float]) -> None:
        """Tell the loggers further numbers, such as those of a hook."""
        if self._loggers is not None:
            self._loggers.numbers(step, values)

    def evaluation(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write an evaluation's scalar metrics to evaluations.jsonl, and tell the loggers."""
        numbers = scalars(metrics)
        if self._evaluations is not None:
            self._evaluations.add(json.dumps(without_nonfinite({"step": step, **numbers})))
        if self._loggers is not None:
            self._loggers.numbers(step, {f"evaluation/{name}": value for name, value in numbers.items()})


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
