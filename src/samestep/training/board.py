"""TensorBoard's writer, without TensorFlow, for which it looks: loading that takes seconds and half a gigabyte."""

import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

# The module by which TensorBoard is told to write files by itself: where there is one, it does not import TensorFlow.
_MARKER = "tensorboard.compat.notf"

_marked = _MARKER not in sys.modules
if _marked:
    sys.modules[_MARKER] = ModuleType(_MARKER)
try:
    from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]  (generated)
    from torch.utils.tensorboard import SummaryWriter
finally:
    if _marked:
        del sys.modules[_MARKER]


class Board:
    """Writes curves for TensorBoard into a folder."""

    def __init__(self, folder: Path, *, purge_step: int | None = None) -> None:
        """`purge_step`: what the folder has of this step and later ones, by another run, is not shown any more."""
        self._writer = SummaryWriter(folder, purge_step=purge_step)

    def draw(self, step: int, values: Mapping[str, float]) -> None:
        """Add a point to each curve. One event for all of them: each one costs a change of threads."""
        points = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        if points and self._writer.file_writer is not None:
            self._writer.file_writer.add_summary(Summary(value=points), step)

    def close(self) -> None:
        self._writer.close()
