"""What each back end supports, found by trying: ranks are started again behind an attempt that crashed or hung."""

import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samestep import environment
from samestep.comm.support import GROUP, OF_A_DEVICE, Notes, try_all
from samestep.comm_bench.run import meet, on_ranks
from samestep.comm_bench.try_ranks import read_notes, run_ranks
from samestep.errors import StartError
from samestep.ranks import DeviceChoice
from samestep.subprocess_group import Outcome, signals_raise

_START = 120.0  # seconds for ranks to start, beside their attempts


@dataclass(frozen=True, kw_only=True)
class Support:
    """All attempts and their outcomes."""

    ranks: int
    missing: Mapping[str, str]  # transport -> why it is unavailable here
    attempts: Sequence[Mapping[str, Any]]  # transport, device, collective, dtype, verdict, reason

    def tables(self) -> dict[tuple[str, str], dict[str, dict[str, str]]]:
        """Group verdicts by transport and device, then by collective, then by dtype."""
        found: dict[tuple[str, str], dict[str, dict[str, str]]] = {}
        for each in self.attempts:
            if each["collective"] != GROUP:
                rows = found.setdefault((each["transport"], each["device"]), {})
                rows.setdefault(each["collective"], {})[each["dtype"]] = each["verdict"]
        return found

    def reasons(self) -> list[str]:
        """Describe failures, a line for each reason with the collectives and dtypes that it applies to."""
        dtypes: dict[tuple[str, str, str, str], list[str]] = {}
        for each in self.attempts:
            if each["verdict"] != "works":
                key = (each["transport"], each["device"], each["collective"], f"{each['verdict']}: {each['reason']}")
                dtypes.setdefault(key, []).append(each["dtype"])
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
    """Try every collective, dtype and device, for `limit` seconds an attempt; None except on rank 0.

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
        try_all(met.place, met.control, notes, first=0, limit=None)
        return notes.lines if met.world.rank == 0 else None


def try_rank(file: str, device: DeviceChoice, first: int, limit: float) -> None:
    """Run the attempts from number `first` on this rank, `limit` seconds each; rank 0 writes them to `file`."""
    with meet(device) as met:
        try_all(met.place, met.control, Notes(Path(file)), first=first, limit=limit)


def _tried(folder: Path, device: DeviceChoice, ranks: int, limit: float) -> list[dict[str, Any]]:
    """Start ranks until all attempts are done; new ranks resume after the attempt that stopped the previous ones."""
    lines: list[dict[str, Any]] = []
    first = 0
    print(f"samestep: {ranks} ranks try every collective with every dtype", file=sys.stderr)
    while True:
        file = folder / f"from-{first}.jsonl"
        outcome = run_ranks(try_rank, (str(file), device, first, limit), ranks, limit=_START + OF_A_DEVICE * limit)
        found = read_notes(file)
        lines += found
        total = next((line["attempts"] for line in found if "attempts" in line), None)
        if total is not None and total == 1 + max((line["index"] for line in found if "verdict" in line), default=-1):
            return lines
        stopped = _stopped(found, outcome)
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


def _stopped(lines: Sequence[Mapping[str, Any]], outcome: Outcome) -> dict[str, Any] | None:
    """Return the unfinished attempt with its verdict, hangs or crashes; None if there is none."""
    ended = {line["index"] for line in lines if "verdict" in line}
    begun = [line for line in lines if "collective" in line and line["index"] not in ended]
    if not begun:
        return None
    line = dict(begun[0])
    if outcome.code is None or any(each.get("timed_out") for each in lines):
        return {**line, "verdict": "hangs", "reason": "it did not return within the time limit"}
    return {**line, "verdict": "crashes", "reason": _why(outcome.output)}


def _why(output: str) -> str:
    """Return the output line that says how the first rank ended."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return next((line for line in reversed(lines) if "ended" in line), lines[-1] if lines else "it said nothing")
