"""This host's clock: whether it goes forward, and whether the system says that it follows a time server."""

import ctypes
import itertools
import sys
import time
from collections.abc import Iterator
from typing import Any

from samestep.doctor.finding import Asked, Finding, ok, problem, warning

_STEPS = 1000
_UNSYNCHRONISED = 5  # TIME_ERROR of adjtimex(2)


def clock(asked: Asked) -> Iterator[Finding]:
    times = [time.monotonic_ns() for _ in range(_STEPS)]
    if any(later < earlier for earlier, later in itertools.pairwise(times)):
        yield problem("clock", "the monotonic clock goes backwards", "choose another clock source in the kernel")
        return
    state = _state()
    values: dict[str, Any] = {"synchronised": None if state is None else state != _UNSYNCHRONISED}
    text = "it goes forward"
    if state is None or state < 0:
        yield ok("clock", f"{text}; whether it follows a time server is not known here")
    elif state != _UNSYNCHRONISED:
        yield ok("clock", f"{text}, and follows a time server", **values)
    elif asked.hosts:
        remedy = "let all hosts follow one time server: chrony or systemd-timesyncd"
        yield warning("clock", f"{text}, and follows no time server", remedy, **values)
    else:
        yield ok("clock", f"{text}, and follows no time server; that matters between hosts", **values)


def _state() -> int | None:
    """What adjtimex(2) says of the system's clock, which it is only asked and not told; None where there is none."""
    if sys.platform != "linux":
        return None
    asked = ctypes.create_string_buffer(512)  # struct timex; modes of 0 changes nothing
    try:
        return ctypes.CDLL(None).adjtimex(asked)
    except (OSError, AttributeError):
        return None
