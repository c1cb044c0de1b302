"""Heartbeat: a thread of a rank that says what the rank has entered, and hears that the job is to stop."""

import threading
from collections.abc import Callable
from pathlib import Path

from samestep.supervision import counts, pace
from samestep.supervision.pace import Pace

_PACE_BEATS = 20  # between two words on how long steps take
_NOTICE_FILE = "notice"  # holds the number of the signal


class Heartbeat:
    """Beats every `apart` seconds until it is stopped."""

    def __init__(self, folder: Path, rank: int, *, apart: float, own: Pace, noticed: Callable[[int], None]) -> None:
        self._own = own
        self._folder = folder
        self._rank = rank
        self._apart = apart
        self._noticed = noticed
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        last: counts.Counts = {}
        beats = 0
        while not self._stop.wait(self._apart):
            entered = counts.counts()
            if entered != last:
                counts.write(self._folder, self._rank, entered)
                last = entered
            beats += 1
            if beats % _PACE_BEATS == 0:
                pace.write(self._folder, self._rank, self._own.recent())
            number = notice_in(self._folder)
            if number is not None:
                self._noticed(number)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


def give_notice(folder: Path, number: int) -> None:
    """Tell the ranks of a round which signal asked the job to stop."""
    new = folder / "notice.new"
    new.write_text(str(number), encoding="ascii")
    new.replace(folder / _NOTICE_FILE)


def notice_in(folder: Path) -> int | None:
    try:
        return int((folder / _NOTICE_FILE).read_text(encoding="ascii"))
    except FileNotFoundError:
        return None
