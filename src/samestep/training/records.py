"""What a training leaves on disk while it runs: metrics.jsonl and TensorBoard's events. Rank 0 writes."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from samestep.training.evaluation import scalars


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
            self._steps.write(json.dumps(values) + "\n")
        self._draw(values["step"], {f"train/{name}": values[name] for name in ("loss", "grad_norm", "lr")})

    def evaluation(self, step: int, metrics: Mapping[str, Any]) -> None:
        numbers = scalars(metrics)
        if self._evaluations is not None:
            self._evaluations.write(json.dumps({"step": step, **numbers}) + "\n")
        self._draw(step, {f"evaluation/{name}": value for name, value in numbers.items()})

    def _draw(self, step: int, values: Mapping[str, float]) -> None:
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(name, value, step)
