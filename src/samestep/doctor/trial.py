"""Which collectives work here: ranks of the doctor's own try them, and end at a time limit if they hang."""

import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samestep.cluster.device import DeviceChoice, accelerators, backend_of, device_of
from samestep.comparison import process
from samestep.comparison.process import Outcome
from samestep.doctor.collectives import COLLECTIVES, notes_of
from samestep.doctor.finding import Finding, ok, problem, warning

_MODULE = "samestep.doctor.try_ranks"
_RANKS = 2


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Ranks on one kind of device."""

    backend: str
    device: DeviceChoice
    ranks: int


def trials() -> list[Trial]:
    """One on the CPU, and one on the accelerators where there are any, with a rank on each."""
    found = [Trial(backend="gloo", device="cpu", ranks=_RANKS)]
    if there := accelerators():
        backend = backend_of(device_of(0)).rpartition(":")[2]
        found.append(Trial(backend=backend, device="auto", ranks=min(_RANKS, there)))
    return found


def collectives(trial: Trial, limit: float) -> Iterator[Finding]:
    """Start the ranks, and say which collectives gave the right result with which types."""
    with tempfile.TemporaryDirectory(prefix="samestep-doctor-") as name:
        folder = Path(name)
        command = [sys.executable, "-m", _MODULE, str(folder), trial.device, str(trial.ranks)]
        outcome = process.run(command, limit=limit)
        notes = [_read(notes_of(folder, rank)) for rank in range(trial.ranks)]
    yield _finding(trial, outcome, notes, limit)


def _read(file: Path) -> list[dict[str, Any]]:
    if not file.is_file():
        return []
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]  # the last may have been cut


def _finding(trial: Trial, outcome: Outcome, notes: list[list[dict[str, Any]]], limit: float) -> Finding:
    subject = f"backend {trial.backend}"
    # An attempt works where it works on every rank.
    table: dict[str, dict[str, bool]] = {}
    reasons: dict[str, str] = {}
    for rank, lines in enumerate(notes):
        for line in lines:
            if "works" in line:
                row = table.setdefault(line["collective"], {})
                row[line["dtype"]] = row.get(line["dtype"], True) and line["works"]
                if not line["works"]:
                    reasons.setdefault(f"{line['collective']} of {line['dtype']}", f"rank {rank}: {line['reason']}")
    values = {"ranks": trial.ranks, "seconds": outcome.seconds, "collectives": table, "reasons": reasons}
    tried = sum(map(len, table.values()))
    if outcome.code is None or any(lines and "works" not in lines[-1] for lines in notes):
        return problem(subject, _stuck(outcome, notes, limit), _REMEDY, **values)
    if outcome.code != 0:
        last = [line for line in outcome.output.splitlines() if line.strip()]
        text = f"ranks can't be started or ended: {last[-1] if last else f'exit code {outcome.code}'}"
        return problem(subject, text, _REMEDY, **values)
    if reasons:
        first, reason = next(iter(reasons.items()))
        text = (
            f"{len(reasons)} of {tried} attempts fail on {trial.ranks} ranks: {', '.join(reasons)}; {first}: {reason}"
        )
        return warning(subject, text, "a layout that does without, or a PyTorch whose back end has it", **values)
    text = (
        f"{len(table)} of {len(COLLECTIVES)} collectives work on {trial.ranks} rank{'s' if trial.ranks > 1 else ''}"
    )
    return ok(subject, f"{text}, {tried} attempts, {outcome.seconds:.1f} s", **values)


_REMEDY = (
    "samestep doctor --json FILE has all attempts; look at the loopback, open files and shared memory above first"
)


def _stuck(outcome: Outcome, notes: list[list[dict[str, Any]]], limit: float) -> str:
    """Where each rank was when the trial ended."""
    places = []
    for rank, lines in enumerate(notes):
        if not lines:
            places.append(f"rank {rank} did not come to the first collective")
        elif "works" not in lines[-1]:
            places.append(f"rank {rank} stayed in {lines[-1]['collective']} of {lines[-1]['dtype']}")
        else:
            places.append(f"rank {rank} was through with {lines[-1]['collective']} of {lines[-1]['dtype']}")
    ended = f"stopped after {limit:g} s" if outcome.code is None else f"ended with exit code {outcome.code}"
    return f"{ended}: {'; '.join(places)}"
