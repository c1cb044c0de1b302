"""Find out which collectives a transport supports, on which devices and dtypes, by trying each of them.

Runs on the ranks. Rank 0 logs each attempt before it is made, so that the launcher knows which attempt crashed or
hung the ranks, and can start new ranks that continue with the next one.
"""

import json
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from samestep.comm.collectives import COLLECTIVES
from samestep.comm.correctness import DTYPES, WRONG, agreed, attempt, short
from samestep.comm.transports import TABLE, Place, title_of

Verdict = Literal["works", "refused", "wrong", "hangs", "crashes"]

GROUP = "(process group)"  # the first attempt with each transport and device: to make its group
OF_A_DEVICE = 1 + sum(1 if each.gives == "none" else len(DTYPES) for each in COLLECTIVES.values())  # attempts

_TIMED_OUT = 3  # exit code of a rank whose attempt timed out


@dataclass(frozen=True, kw_only=True)
class Try:
    """One attempt."""

    index: int
    transport: str  # its key in the table
    title: str
    device: str
    collective: str
    dtype: torch.dtype

    def to_json(self) -> dict[str, Any]:
        named = {"transport": self.title, "device": self.device, "collective": self.collective}
        return {"index": self.index, **named, "dtype": short(self.dtype)}


def tries(place: Place) -> Iterator[Try]:
    """All attempts, in their order; a barrier has no dtype and is tried once."""
    index = 0
    for name, transport in TABLE.items():
        if transport.missing(place) is not None:
            continue
        for device in transport.devices(place):
            for collective in (GROUP, *COLLECTIVES):
                once = collective == GROUP or COLLECTIVES[collective].gives == "none"
                for dtype in [torch.float32] if once else DTYPES:
                    yield Try(
                        index=index,
                        transport=name,
                        title=title_of(name, place),
                        device=device.type,
                        collective=collective,
                        dtype=dtype,
                    )
                    index += 1


class Notes:
    """Log of the attempts as JSON lines, in a list and, if given, in a file."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self.lines: list[dict[str, Any]] = []

    def write(self, line: dict[str, Any]) -> None:
        """Append a line immediately, since an attempt may end the process."""
        self.lines.append(line)
        if self._file is not None:
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


def try_all(place: Place, control: dist.ProcessGroup, notes: Notes, *, first: int, limit: float | None) -> None:
    """Make the attempts from index `first` on, on each rank; rank 0 logs their results.

    `limit`: seconds after which a rank exits if an attempt has not returned; None: the back end's timeout applies.
    """
    say = notes.write if control.rank() == 0 else lambda line: None
    for name, transport in TABLE.items():
        if first == 0 and (reason := transport.missing(place)) is not None:
            say({"transport": name, "missing": reason})
    groups: dict[str, dist.ProcessGroup] = {}
    lost: dict[tuple[str, str], str] = {}  # of transport and device, why there is no group
    last = {each.transport: each.index for each in tries(place)}
    say({"attempts": 1 + max(last.values(), default=-1)})
    for each in tries(place):
        if each.index < first and (each.collective != GROUP or last[each.transport] < first):
            continue
        at = (each.transport, each.device)
        if at in lost:
            say({**each.to_json(), "verdict": "refused", "reason": lost[at]})
            continue
        if each.index >= first:
            say(each.to_json())
        with _Watchdog(limit, lambda each=each: say({"index": each.index, "timed_out": True})):
            if each.collective == GROUP:
                told = agreed(_group(each, place, groups), control)
            else:
                device = next(one for one in TABLE[each.transport].devices(place) if one.type == each.device)
                mine = attempt(COLLECTIVES[each.collective], groups[each.transport], each.dtype, device)
                told = agreed(mine, control)
        if each.collective == GROUP and told is not None:
            lost[at] = told
        if each.index >= first:
            say({**each.to_json(), "verdict": _verdict(told), "reason": told})


def _group(each: Try, place: Place, groups: dict[str, dist.ProcessGroup]) -> str | None:
    """Create a transport's group unless it exists. Returns the error on this rank, or None."""
    if each.transport not in groups:
        try:
            groups[each.transport] = TABLE[each.transport].group(place)
        except Exception as error:  # of whatever kind the back end has
            return str(error).partition("\n")[0] or type(error).__name__
    return None


def _verdict(reason: str | None) -> Verdict:
    if reason is None:
        return "works"
    return "wrong" if WRONG in reason else "refused"


class _Watchdog:
    """Exits the process if the block takes longer than `limit` seconds, since a hung collective can't be cancelled.

    `last_word` is called before the exit.
    """

    def __init__(self, limit: float | None, last_word: Any) -> None:
        self._timer = None if limit is None else threading.Timer(limit, self._end)
        self._last_word = last_word

    def _end(self) -> None:
        """Log the attempt that hung, and exit at once: a hung collective can't be interrupted otherwise."""
        self._last_word()
        os._exit(_TIMED_OUT)

    def __enter__(self) -> None:
        if self._timer is not None:
            self._timer.daemon = True
            self._timer.start()

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
