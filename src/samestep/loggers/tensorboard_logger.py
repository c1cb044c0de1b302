"""TensorBoard's event writer, imported without TensorFlow, which takes seconds and half a gigabyte to import."""

import sys
import threading
from collections.abc import Mapping
from types import ModuleType

from samestep.job import Log
from samestep.loggers.base import LoggedRun, Logger

# If a module of this name is in sys.modules, TensorBoard writes files itself and does not import TensorFlow.
_MARKER = "tensorboard.compat.notf"
_WRITER = "_AsyncWriterThread"

_marked = _MARKER not in sys.modules
if _marked:
    sys.modules[_MARKER] = ModuleType(_MARKER)
try:
    from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]  (generated)
    from torch.utils.tensorboard import SummaryWriter
finally:
    if _marked:
        del sys.modules[_MARKER]


class TensorBoard(Logger):
    """Writes events into tensorboard/ of the run's folder."""

    def __init__(self, settings: Log, run: LoggedRun) -> None:
        """Hide what an earlier start has written for the first step and later ones."""
        self._excepthook = threading.excepthook
        threading.excepthook = self._leave_out_writers
        self._writer = SummaryWriter(run.folder / "tensorboard", purge_step=run.first_step or None)

    @classmethod
    def check(cls, settings: Log, environ: Mapping[str, str]) -> None:
        """Nothing can be missing."""

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        """Add a point to each curve. They share one event, since each event costs a thread switch."""
        points = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        if points and self._writer.file_writer is not None:
            self._writer.file_writer.add_summary(Summary(value=points), step)

    def text(self, step: int, name: str, text: str) -> None:
        self._writer.add_text(name, text, step)

    def close(self, *, failed: bool) -> None:
        """Write what is left; also after an error, which is raised again."""
        try:
            self._writer.close()
        finally:
            self.leave()

    def leave(self) -> None:
        """Show the errors of threads again."""
        if threading.excepthook == self._leave_out_writers:
            threading.excepthook = self._excepthook

    def _leave_out_writers(self, failed: threading.ExceptHookArgs) -> None:
        """Print no traceback of TensorBoard's thread that the disk refused: the next call raises the error."""
        if not (isinstance(failed.exc_value, OSError) and type(failed.thread).__name__ == _WRITER):
            self._excepthook(failed)
