"""SIGTERM and Ctrl-C in the starting process: first notice to the ranks, which stop after a step; then the end."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from torch.distributed.elastic.multiprocessing import SignalException

from samestep.supervision.heartbeat import give_notice
from samestep.supervision.watch import Watch

TAKEN = ("SIGTERM", "SIGINT")
_AGAIN = 0.5  # seconds; a signal to the whole process group and one to this process are the same notice


class Signals:
    """Takes signals for a whole training, whichever round it is in."""

    def __init__(self, *, notice: float) -> None:
        """`notice`: seconds that the ranks have to save and end."""
        self._notice = notice
        self._at = 0.0
        self._before: dict[int, Any] = {}
        self._round: tuple[Path, Watch] | None = None
        self.number: int | None = None  # of the signal that asked the job to stop

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._hear) for number in map(_number, TAKEN)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def of(self, folder: Path, watch: Watch) -> Iterator[None]:
        """For the time of a round."""
        self._round = folder, watch
        if self.number is not None:
            self._tell_ranks()
        try:
            yield
        finally:
            self._round = None

    def _hear(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.number is None:
            self.number, self._at = number, now
            # Not print: the signal may have come in the middle of one.
            name = signal.Signals(number).name
            os.write(2, f"samestep: {name}: the ranks save and stop; a second one ends them at once\n".encode())
            self._tell_ranks()
        elif now - self._at > _AGAIN:
            if self._round is not None:
                self._round[1].end_now()
            raise SignalException(f"a second {signal.Signals(number).name}", signal.Signals(number))

    def _tell_ranks(self) -> None:
        if self._round is not None and self.number is not None:
            folder, watch = self._round
            give_notice(folder, self.number)
            watch.end_within(self._notice)


def _number(name: str) -> int:
    return int(signal.Signals[name])
