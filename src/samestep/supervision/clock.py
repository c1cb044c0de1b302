"""A clock that stands still while this process does, so that a job that was paused has not hung."""

import time


class Clock:
    """Counts the seconds between looks, each at most a little longer than looks are apart."""

    def __init__(self, apart: float) -> None:
        self._most = 5 * apart
        self._last = time.monotonic()
        self.seconds = 0.0

    def look(self) -> float:
        now = time.monotonic()
        self.seconds += min(now - self._last, self._most)
        self._last = now
        return self.seconds
