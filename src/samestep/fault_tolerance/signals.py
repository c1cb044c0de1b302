"""The first signal that asks a process to stop, and a second one, which asks for it at once."""

import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import Any, Self

ASKING = (signal.SIGTERM, signal.SIGINT)
ENDING = (*ASKING, signal.SIGHUP, signal.SIGQUIT)
# Seconds in which a second signal counts as the first one again: launchers forward a signal to processes that already
# had it, and one may go to the process group and to this process.
SECOND_SIGNAL = 0.5

Heard = Callable[[int], None]  # called with a signal's number, in its handler


class TwoSignals:
    """Handles some signals of this process while it is entered, if that is done in the main thread."""

    def __init__(self, numbers: Sequence[int], *, first: Heard, second: Heard, ignored: Sequence[int] = ()) -> None:
        """`second` is also called for all that follow. `ignored`: those of `numbers` that have no effect."""
        self._numbers, self._ignored = numbers, ignored
        self._first: Heard | None = first
        self._second = second
        self._at = 0.0
        self._before: dict[int, Any] = {}
        self.number: int | None = None  # of the first one

    def __enter__(self) -> Self:
        self.listen()
        return self

    def listen(self) -> None:
        """Install the handlers, if this is the main thread."""
        if threading.current_thread() is threading.main_thread():
            for number in self._numbers:
                handler: Any = signal.SIG_IGN if number in self._ignored else self._hear
                self._before[number] = signal.signal(number, handler)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()

    def leave(self) -> None:
        """Restore the handlers of before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def only_note(self) -> None:
        """From now on a first signal is noted, and nothing is called for it."""
        self._first = None

    def _hear(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.number is None:
            self.number, self._at = number, now
            if self._first is not None:
                self._first(number)
        elif now - self._at > SECOND_SIGNAL:
            self._second(number)
