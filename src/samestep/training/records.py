"""What a training leaves on disk while it runs: metrics.jsonl and TensorBoard's events. Rank 0 writes."""

import json
import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Self

from samestep.supervision.nonfinite import without_nonfinite
from samestep.training.evaluation import scalars

# The module by which TensorBoard is told to write files by itself: where there is one, it does not import TensorFlow.
_MARKER = "tensorboard.compat.notf"


@contextmanager
def _tensorflow_left_alone() -> Iterator[None]:
    """TensorBoard looks for TensorFlow once, and loading it takes seconds and half a gigabyte."""
    if _MARKER in sys.modules:
        yield
        return
    sys.modules[_MARKER] = ModuleType(_MARKER)
    try:
        yield
    finally:
        del sys.modules[_MARKER]


class Records:
    """Writes one line a step to metrics.jsonl, one line an evaluation to evaluations.jsonl, both to TensorBoard."""

    def __init__(self, folder: Path | None, *, tensorboard: bool) -> None:
        self._steps = self._evaluations = self._board = None
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        self._steps = (folder / "metrics.jsonl").open("w", encoding="utf-8", buffering=1)  # line by line
        self._evaluations = (folder / "evaluations.jsonl").open("w", encoding="utf-8", buffering=1)
        if tensorboard:
            with _tensorflow_left_alone():
                from torch.utils.tensorboard import SummaryWriter

                self._board = SummaryWriter(folder / "tensorboard")

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
        self._draw(values["step"], {f"train/{name}": values[name] for name in ("loss", "grad_norm", "lr")})

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
