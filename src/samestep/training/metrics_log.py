"""metrics.jsonl and TensorBoard events of a training while it runs.

Rank 0 writes; each rank's count of samples is a line of its own, and their sum is the data set.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

import torch.distributed as dist

from samestep.data.loader import StepBatch
from samestep.fault_tolerance.lease import Held
from samestep.fault_tolerance.nonfinite import without_nonfinite
from samestep.run_folder import EVALUATIONS_FILE, METRICS_FILE, json_lines
from samestep.training.evaluation import scalars


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
        like = len({size for mine in counts for size in mine}) == 1
        lines = [
            f"rank {rank}: {_product(mine, len(counts)) if like else _sum(mine)}"
            for rank, mine in zip(ranks, counts, strict=True)
        ]
        total = sum(sum(mine) for mine in counts)
        return [*lines, f"all ranks: {total:,} of {self._data_set:,} samples in the first epoch"]


def _product(samples: Sequence[int], ranks: int) -> str:
    """The line of a rank if every rank takes the same number of samples in every step."""
    together = "1 rank" if ranks == 1 else f"{ranks} ranks"
    return f"{len(samples)} steps x {samples[0]} samples x {together} = {len(samples) * samples[0] * ranks:,}"


def _sum(samples: Sequence[int]) -> str:
    """A line such as "12 steps of 8 or 7 samples = 95"."""
    sizes = sorted(set(samples), reverse=True)
    return f"{len(samples)} steps of {' or '.join(map(str, sizes))} samples = {sum(samples):,}"


class Records:
    """Writes a line per step to metrics.jsonl and one per evaluation to evaluations.jsonl, and to TensorBoard."""

    def __init__(
        self, folder: Path | None, *, first_step: int = 0, tensorboard: bool, held: Held | None = None
    ) -> None:
        """`held`: the lease of the folder, which is looked at now and then while steps are written."""
        self._held = held
        self._steps = self._evaluations = self._board = None
        self.losses: list[float] = []  # of steps before `first_step`, if the file has all of them
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        metrics, evaluations = folder / METRICS_FILE, folder / EVALUATIONS_FILE
        kept = _lines_before(metrics, first_step)
        if [values["step"] for _, values in kept] == list(range(first_step)):
            self.losses = [math.nan if values["loss"] is None else values["loss"] for _, values in kept]
        self._steps = _rewritten(metrics, [line for line, _ in kept])
        self._evaluations = _rewritten(evaluations, [line for line, _ in _lines_before(evaluations, first_step + 1)])
        if tensorboard:
            from samestep.training.board import Board

            self._board = Board(folder / "tensorboard", purge_step=first_step or None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in (self._steps, self._evaluations, self._board):
            if file is not None:
                file.close()

    def step(self, values: Mapping[str, Any]) -> None:
        """Write a step's line to metrics.jsonl and its values to TensorBoard. Raises LeaseLostError."""
        if self._held is not None and self._steps is not None:
            self._held.look()
        if self._steps is not None:
            self._steps.write(json.dumps(without_nonfinite(dict(values))) + "\n")
        terms = {f"train/losses/{name}": value for name, value in values.get("losses", {}).items()}
        self._draw(values["step"], {f"train/{name}": values[name] for name in ("loss", "grad_norm", "lr")} | terms)

    def evaluation(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write an evaluation's scalar metrics to evaluations.jsonl and TensorBoard."""
        numbers = scalars(metrics)
        if self._evaluations is not None:
            self._evaluations.write(json.dumps(without_nonfinite({"step": step, **numbers})) + "\n")
        self._draw(step, {f"evaluation/{name}": value for name, value in numbers.items()})

    def _draw(self, step: int, values: Mapping[str, float]) -> None:
        """Add the finite values to TensorBoard's curves."""
        if self._board is not None:
            self._board.draw(step, {name: value for name, value in values.items() if math.isfinite(value)})


def _lines_before(file: Path, step: int) -> list[tuple[str, dict[str, Any]]]:
    """The lines of steps before `step`, raw and parsed; skips the partial line of a run that was killed."""
    if not step:
        return []
    lines = json_lines(file)
    read = zip(lines.texts, lines.values, strict=True)
    return [(text, values) for text, values in read if values.get("step", step) < step]


def _rewritten(file: Path, lines: Sequence[str]) -> TextIO:
    """Replace a file by one with these lines, and open it for appending, line-buffered.

    The replacement is atomic: a process that is killed here leaves the old file or the new one.
    """
    new = file.with_name(f"{file.name}.new")
    new.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    new.replace(file)
    return file.open("a", encoding="utf-8", buffering=1)
