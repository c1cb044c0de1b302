"""What each transport supports, found by trying every collective with every dtype on each device.

An attempt may crash the ranks or make them hang. So rank 0 notes each one before it is made and when it is over.
Where ranks have ended, the process that starts them reads in the notes which attempt it was, and new ranks go on
behind it.
`supported` and what follows it runs in that process, `SupportAttempt` and what follows it on each rank.
"""

import os
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from samestep import environment
from samestep.comm.collectives import COLLECTIVES
from samestep.comm.correctness import DTYPES, WRONG, agreed, attempt, short
from samestep.comm.transports import TABLE, TransportContext, title_of
from samestep.comm_bench.run import meet, on_ranks
from samestep.comm_bench.try_ranks import Notes, read_notes, run_ranks
from samestep.errors import StartError
from samestep.ranks import DeviceChoice
from samestep.subprocess_group import CommandOutcome, signals_raise

Verdict = Literal["works", "refused", "wrong", "hangs", "crashes"]

GROUP = "(process group)"  # the first attempt with each transport and device: to make its group
OF_A_DEVICE = 1 + sum(
    1 if collective.gives == "none" else len(DTYPES) for collective in COLLECTIVES.values()
)  # attempts

_TIMED_OUT = 3  # exit code of a rank whose attempt timed out
_START = 120.0  # seconds for ranks to start, in addition to their attempts


@dataclass(frozen=True, kw_only=True)
class Support:
    """All attempts and their outcomes."""

    ranks: int
    missing: Mapping[str, str]  # transport -> why it is unavailable here
    attempts: Sequence[Mapping[str, Any]]  # transport, device, collective, dtype, verdict, reason

    def tables(self) -> dict[tuple[str, str], dict[str, dict[str, str]]]:
        """Group verdicts by transport and device, then by collective, then by dtype."""
        by_transport: dict[tuple[str, str], dict[str, dict[str, str]]] = {}
        for row in self.attempts:
            if row["collective"] != GROUP:
                rows = by_transport.setdefault((row["transport"], row["device"]), {})
                rows.setdefault(row["collective"], {})[row["dtype"]] = row["verdict"]
        return by_transport

    def reasons(self) -> list[str]:
        """Describe failures, a line for each reason with the collectives and dtypes that it applies to."""
        dtypes: dict[tuple[str, str, str, str], list[str]] = {}
        for row in self.attempts:
            if row["verdict"] != "works":
                key = (
                    row["transport"],
                    row["device"],
                    row["collective"],
                    f"{row['verdict']}: {row['reason']}",
                )
                dtypes.setdefault(key, []).append(row["dtype"])
        lines: dict[tuple[str, str, str, tuple[str, ...]], list[str]] = {}
        for (transport, device, collective, reason), names in dtypes.items():
            lines.setdefault((transport, device, reason, tuple(names)), []).append(collective)
        return [
            f"{transport} on {device}, {', '.join(collectives)} of {', '.join(names)}: {reason}"
            for (transport, device, reason, names), collectives in lines.items()
        ]

    def to_json(self) -> dict[str, Any]:
        return {"ranks": self.ranks, "missing": dict(self.missing), "attempts": list(map(dict, self.attempts))}


def supported(device: DeviceChoice, ranks: int, *, limit: float) -> Support | None:
    """Try every collective, dtype and device, for `limit` seconds an row; None except on rank 0.

    Ranks that a launcher has started can't be restarted here: a crash ends the job.
    """
    if environment.ranks() is not None:
        lines = on_ranks(_try_as_launched, ranks, device)
    else:
        with tempfile.TemporaryDirectory(prefix="samestep-comm-") as folder, signals_raise():
            lines = _tried(Path(folder), device, ranks, limit)
    return None if lines is None else _support(lines, ranks)


def _support(lines: Sequence[Mapping[str, Any]], ranks: int) -> Support:
    """Merge the lines of all starts; for an attempt made twice, the last verdict counts."""
    attempts = {line["index"]: line for line in lines if "verdict" in line}
    return Support(
        ranks=ranks,
        missing={line["transport"]: line["missing"] for line in lines if "missing" in line},
        attempts=[
            {name: value for name, value in attempts[index].items() if name != "index"} for index in sorted(attempts)
        ],
    )


def _try_as_launched(device: DeviceChoice) -> list[dict[str, Any]] | None:
    """Run all attempts in ranks that a launcher has started; the lines on rank 0, None on the others."""
    with meet(device) as met:
        notes = Notes(None)
        _try_all(met.place, met.control, notes, first=0, limit=None)
        return notes.lines if met.world.rank == 0 else None


def try_rank(file: str, device: DeviceChoice, first: int, limit: float) -> None:
    """Run the attempts from number `first` on this rank, `limit` seconds each; rank 0 writes them to `file`."""
    with meet(device) as met:
        _try_all(met.place, met.control, Notes(Path(file)), first=first, limit=limit)


def _tried(folder: Path, device: DeviceChoice, ranks: int, limit: float) -> list[dict[str, Any]]:
    """Start ranks until all attempts are done; new ranks resume after the attempt that stopped the previous ones."""
    lines: list[dict[str, Any]] = []
    first = 0
    print(f"samestep: {ranks} ranks try every collective with every dtype", file=sys.stderr)
    while True:
        file = folder / f"from-{first}.jsonl"
        outcome = run_ranks(try_rank, (str(file), device, first, limit), ranks, limit=_START + OF_A_DEVICE * limit)
        notes = read_notes(file)
        lines += notes
        total = next((line["attempts"] for line in notes if "attempts" in line), None)
        if total is not None and total == 1 + max((line["index"] for line in notes if "verdict" in line), default=-1):
            return lines
        stopped = _stopped(notes, outcome)
        if stopped is None:
            last = [line for line in outcome.output.splitlines() if line.strip()]
            raise StartError(f"{ranks} ranks can't be started: {last[-1] if last else f'exit code {outcome.code}'}")
        lines.append(stopped)
        tried = f"{stopped['collective']} of {stopped['dtype']} over {stopped['transport']}"
        print(f"samestep: {tried} {stopped['verdict']}; new ranks go on behind it", file=sys.stderr)
        # If the process group itself fails, skip all attempts with this transport and device.
        first = stopped["index"] + (OF_A_DEVICE if stopped["collective"] == GROUP else 1)
        if total is not None and first >= total:
            return lines


def _stopped(lines: Sequence[Mapping[str, Any]], outcome: CommandOutcome) -> dict[str, Any] | None:
    """Return the unfinished attempt with its verdict, hangs or crashes; None if there is none."""
    ended = {line["index"] for line in lines if "verdict" in line}
    begun = [line for line in lines if "collective" in line and line["index"] not in ended]
    if not begun:
        return None
    line = dict(begun[0])
    if outcome.code is None or any(line.get("timed_out") for line in lines):
        return {**line, "verdict": "hangs", "reason": "it did not return within the time limit"}
    return {**line, "verdict": "crashes", "reason": _why(outcome.output)}


def _why(output: str) -> str:
    """Return the output line that says how the first rank ended."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return next((line for line in reversed(lines) if "ended" in line), lines[-1] if lines else "it said nothing")


@dataclass(frozen=True, kw_only=True)
class SupportAttempt:
    """One collective with one dtype, through one transport on one device."""

    index: int
    transport: str  # its key in the table
    title: str
    device: str
    collective: str
    dtype: torch.dtype

    def to_json(self) -> dict[str, Any]:
        named = {"transport": self.title, "device": self.device, "collective": self.collective}
        return {"index": self.index, **named, "dtype": short(self.dtype)}


def tries(place: TransportContext) -> Iterator[SupportAttempt]:
    """All attempts, in their order; a barrier has no dtype and is tried once."""
    index = 0
    for name, transport in TABLE.items():
        if transport.missing(place) is not None:
            continue
        for device in transport.devices(place):
            for collective in (GROUP, *COLLECTIVES):
                once = collective == GROUP or COLLECTIVES[collective].gives == "none"
                for dtype in [torch.float32] if once else DTYPES:
                    yield SupportAttempt(
                        index=index,
                        transport=name,
                        title=title_of(name, place),
                        device=device.type,
                        collective=collective,
                        dtype=dtype,
                    )
                    index += 1


def _try_all(
    place: TransportContext, control: dist.ProcessGroup, notes: Notes, *, first: int, limit: float | None
) -> None:
    """Make the attempts from index `first` on, on each rank; rank 0 logs their results.

    `limit`: seconds after which a rank exits if an attempt has not returned; None: the back end's timeout applies.
    """
    say = notes.write if control.rank() == 0 else lambda line: None
    for name, transport in TABLE.items():
        if first == 0 and (reason := transport.missing(place)) is not None:
            say({"transport": name, "missing": reason})
    groups: dict[str, dist.ProcessGroup] = {}
    lost: dict[tuple[str, str], str] = {}  # of transport and device, why there is no group
    last = {attempt_.transport: attempt_.index for attempt_ in tries(place)}
    say({"attempts": 1 + max(last.values(), default=-1)})
    for try_ in tries(place):
        if try_.index < first and (try_.collective != GROUP or last[try_.transport] < first):
            continue
        at = (try_.transport, try_.device)
        if at in lost:
            say({**try_.to_json(), "verdict": "refused", "reason": lost[at]})
            continue
        if try_.index >= first:
            say(try_.to_json())
        with _Watchdog(limit, lambda attempt_=try_: say({"index": attempt_.index, "timed_out": True})):
            if try_.collective == GROUP:
                told = agreed(_group(try_, place, groups), control)
            else:
                device = next(one for one in TABLE[try_.transport].devices(place) if one.type == try_.device)
                outcome_here = attempt(COLLECTIVES[try_.collective], groups[try_.transport], try_.dtype, device)
                told = agreed(outcome_here, control)
        if try_.collective == GROUP and told is not None:
            lost[at] = told
        if try_.index >= first:
            say({**try_.to_json(), "verdict": _verdict(told), "reason": told})


def _group(attempt: SupportAttempt, place: TransportContext, groups: dict[str, dist.ProcessGroup]) -> str | None:
    """Create a transport's group unless it exists. Returns why this rank has none, or None."""
    transport = TABLE[attempt.transport]
    if attempt.transport not in groups:
        try:
            groups[attempt.transport] = transport.group(place)
        except Exception as error:  # of whatever kind the back end has
            return str(error).partition("\n")[0] or type(error).__name__
    # Attempts through a group that fell back would be another transport's.
    return transport.fallen_back(groups[attempt.transport])


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
