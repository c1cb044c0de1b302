"""Which collectives work here: ranks of the doctor's own try each as `samestep comm` does (`comm.correctness`).

They end at a time limit if they hang. Each notes its own attempts, which shows where which rank hangs.
"""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from samestep.comm.collectives import COLLECTIVES
from samestep.comm.correctness import attempt, short
from samestep.comm_bench.try_ranks import Notes, read_notes, run_ranks
from samestep.doctor.findings import DoctorFinding, ok, problem, warning
from samestep.launch.device import DeviceChoice, accelerators, backend_of, device_of
from samestep.launch.world import join
from samestep.subprocess_group import CommandOutcome

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64)
ALONE = frozenset(COLLECTIVES) - {"send/recv"}  # collectives that one rank can try: none with a peer


def dtypes_of(collective: str) -> Sequence[torch.dtype]:
    """Return the dtypes to try a collective with; a barrier has no tensor and is tried once."""
    return DTYPES if COLLECTIVES[collective].gives != "none" else DTYPES[:1]


def notes_of(folder: Path, rank: int) -> Path:
    """Return the file in which a rank writes a line before and after each attempt."""
    return folder / f"rank-{rank}.jsonl"


def try_all(folder: str, device: DeviceChoice) -> None:
    """Try every collective with every dtype, as one of the ranks started for it."""
    with join(device=device, threads=1) as world:
        group = dist.group.WORLD
        assert group is not None
        notes = Notes(notes_of(Path(folder), world.rank))
        for name, collective in COLLECTIVES.items():
            if world.world_size == 1 and name not in ALONE:
                continue
            for dtype in dtypes_of(name):
                tried = {"collective": name, "dtype": short(dtype)}
                notes.write(tried)
                reason = attempt(collective, group, dtype, world.device)
                notes.write({**tried, "works": reason is None, "reason": reason})


_RANKS = 2


@dataclass(frozen=True, kw_only=True)
class CollectiveTrial:
    """The back end, device and number of ranks to try."""

    backend: str
    device: DeviceChoice
    ranks: int


def trials() -> list[CollectiveTrial]:
    """Return a trial on the CPU, and one on the accelerators if there are any, one rank on each."""
    trials = [CollectiveTrial(backend="gloo", device="cpu", ranks=_RANKS)]
    if there := accelerators():
        backend = backend_of(device_of(0)).rpartition(":")[2]
        trials.append(CollectiveTrial(backend=backend, device="auto", ranks=min(_RANKS, there)))
    return trials


def collectives(trial: CollectiveTrial, limit: float) -> Iterator[DoctorFinding]:
    """Start the ranks, and report which collectives gave the right result with which dtypes."""
    with tempfile.TemporaryDirectory(prefix="samestep-doctor-") as name:
        folder = Path(name)
        outcome = run_ranks(try_all, (str(folder), trial.device), trial.ranks, limit=limit)
        notes = [read_notes(notes_of(folder, rank)) for rank in range(trial.ranks)]
    yield _finding(trial, outcome, notes, limit)


def _finding(
    trial: CollectiveTrial, outcome: CommandOutcome, notes: list[list[dict[str, Any]]], limit: float
) -> DoctorFinding:
    """Summarize the ranks' notes: which attempts fail, hang, or were not reached."""
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


def _stuck(outcome: CommandOutcome, notes: list[list[dict[str, Any]]], limit: float) -> str:
    """Describe where each rank was when the trial ended."""
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
