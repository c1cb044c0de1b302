"""Losses and gradient norms that are NaN or infinite: which samples caused them, and how the training goes on."""

import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from samestep.errors import NonFiniteError

Policy = Literal["stop", "skip", "rollback"]
_FEW = 8  # samples that a message names


FILES = "nonfinite-step-*.json"


def file_of(folder: Path, step: int) -> Path:
    return folder / FILES.replace("*", str(step))


class NonFinite:
    """Checks every step's loss and gradient norm; all ranks see the same values and make the same decision."""

    def __init__(
        self,
        policy: Policy,
        folder: Path,
        *,
        samples_of: Callable[[int], Sequence[int]],
        writes: bool,
        norms_may_overflow: bool,
        left_out: frozenset[int] = frozenset(),
    ) -> None:
        """`samples_of` returns a step's samples. With `norms_may_overflow` (fp16) infinite norms are expected.

        Steps in `left_out` were found earlier; they are not taken, and have no values.
        """
        self.left_out = left_out
        self._policy = policy
        self._folder = folder
        self._samples_of = samples_of
        self._writes = writes
        self._norms_may_overflow = norms_may_overflow

    def check(self, step: int, loss: float, grad_norm: float) -> None:
        """Raise NonFiniteError if the policy doesn't let the training go on."""
        if step in self.left_out or (math.isfinite(loss) and (self._norms_may_overflow or math.isfinite(grad_norm))):
            return
        samples = list(self._samples_of(step))
        file = file_of(self._folder, step)
        values = f"loss {loss}, gradient norm {grad_norm}"
        if self._writes:
            record = {
                "step": step,
                "loss": str(loss),
                "grad_norm": str(grad_norm),
                "samples": samples,
                "left_out": self._policy == "rollback",
            }
            file.write_text(json.dumps(record) + "\n", encoding="utf-8")
        error = NonFiniteError(step, values, _shown(samples), str(file))
        if self._policy != "skip":
            raise error
        if self._writes:
            print(f"samestep: {error}; the step is left out", file=sys.stderr)


def left_out(folder: Path) -> frozenset[int]:
    """Return the steps that a training in this folder has left out after rollbacks."""
    records = [json.loads(file.read_text(encoding="utf-8")) for file in folder.glob(FILES)]
    return frozenset(record["step"] for record in records if record["left_out"])


def _shown(samples: Sequence[int]) -> str:
    """The first few samples' numbers."""
    shown = ", ".join(map(str, samples[:_FEW]))
    return shown if len(samples) <= _FEW else f"{shown} and {len(samples) - _FEW} more"


def without_nonfinite(value: Any) -> Any:
    """Replace NaN and infinity by null, which JSON can hold."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: without_nonfinite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nonfinite(inner) for inner in value]
    return value
