"""What a training leaves on disk while it runs: metrics.jsonl and TensorBoard's events. Rank 0 writes."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from samestep.supervision.nonfinite import without_nonfinite
from samestep.training.evaluation import scalars


class Records:
    """Writes one line a step to metrics.jsonl, one line an evaluation to evaluations.jsonl, both to TensorBoard."""

    def __init__(self, folder: Path | None, *, first_step: int = 0, tensorboard: bool) -> None:
        self._steps = self._evaluations = self._board = None
        self.losses: list[float] = []  # of the steps before the first one, where the folder tells of all of them
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        metrics, evaluations = folder / "metrics.jsonl", folder / "evaluations.jsonl"
        kept = _lines_before(metrics, first_step)
        if [values["step"] for values in kept] == list(range(first_step)):
            self.losses = [math.nan if values["loss"] is None else values["loss"] for values in kept]
        self._steps = _rewritten(metrics, kept)
        self._evaluations = _rewritten(evaluations, _lines_before(evaluations, first_step + 1))
        if tensorboard:
            from samestep.training.board import SummaryWriter

            self._board = SummaryWriter(folder / "tensorboard", purge_step=first_step or None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in (self._steps, self._evaluations, self._board):
            if file is not None:
                file.close()

    def step(self, values: Mapping[str, Any]) -> None:
        if self._steps is not None:
            self._steps.write(json.dumps(without_nonfinite(dict(values))) + "\n")
        terms = {f"train/losses/{name}": value for name, value in values.get("losses", {}).items()}
        self._draw(values["step"], {f"train/{name}": values[name] for name in ("loss", "grad_norm", "lr")} | terms)

    def evaluation(self, step: int, metrics: Mapping[str, Any]) -> None:
        numbers = scalars(metrics)
        if self._evaluations is not None:
            self._evaluations.write(json.dumps(without_nonfinite({"step": step, **numbers})) + "\n")
        self._draw(step, {f"evaluation/{name}": value for name, value in numbers.items()})

    def _draw(self, step: int, values: Mapping[str, float]) -> None:
        if self._board is not None:
            for name, value in values.items():
                if not math.isfinite(value):
                    continue
                self._board.add_scalar(name, value, step)


def _lines_before(file: Path, step: int) -> list[dict[str, Any]]:
    """What a file says of the steps before this one; a run that was ended may have left half a line."""
    if not step or not file.is_file():
        return []
    kept: list[dict[str, Any]] = []
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            values = json.loads(line)
        except ValueError:
            continue
        if isinstance(values, dict) and values.get("step", step) < step:
            kept.append(values)
    return kept


def _rewritten(file: Path, lines: Sequence[Mapping[str, Any]]) -> TextIO:
    """A file with these lines alone, open for more; written line by line, so that others can follow it."""
    opened = file.open("w", encoding="utf-8", buffering=1)
    opened.writelines(json.dumps(values) + "\n" for values in lines)
    return opened
