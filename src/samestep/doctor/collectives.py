"""Which collectives work here: ranks of the doctor's own try each, with a result that is known beforehand.

They end at a time limit if they hang.

Rank r gives r + 1 in every element, so each result is known: a sum over n ranks is n (n + 1) / 2.
"""

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.comm_bench.try_ranks import read_notes, run_ranks
from samestep.doctor.findings import Finding, ok, problem, warning
from samestep.launch.device import DeviceChoice, accelerators, backend_of, device_of
from samestep.launch.world import World, join
from samestep.subprocess_group import Outcome

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64)
_COUNT = 5  # elements of a message; odd, so that nothing is split evenly by luck

Attempt = Callable[[World, torch.dtype], bool]  # whether the result is right


def _mine(world: World, dtype: torch.dtype, count: int = _COUNT) -> Tensor:
    """Return a tensor with this rank's number + 1 in every element: [count]."""
    return torch.full([count], world.rank + 1, dtype=dtype, device=world.device)


def _empty(world: World, dtype: torch.dtype, count: int = _COUNT) -> Tensor:
    """Return an output buffer: [count]."""
    return torch.zeros(count, dtype=dtype, device=world.device)


def _is(tensor: Tensor, value: int) -> bool:
    """Whether every element equals a value."""
    return bool((tensor == value).all())


def _send_recv(world: World, dtype: torch.dtype) -> bool:
    """Rank 0 sends to the last rank."""
    last = world.world_size - 1
    if world.rank == 0:
        dist.send(_mine(world, dtype), dst=last)
    elif world.rank == last:
        received = _empty(world, dtype)
        dist.recv(received, src=0)
        return _is(received, 1)
    return True


def _broadcast(world: World, dtype: torch.dtype) -> bool:
    tensor = _mine(world, dtype)
    dist.broadcast(tensor, src=0)
    return _is(tensor, 1)


def _scatter(world: World, dtype: torch.dtype) -> bool:
    received = _empty(world, dtype)
    parts = [torch.full_like(received, rank + 1) for rank in range(world.world_size)]
    dist.scatter(received, parts if world.rank == 0 else None, src=0)
    return _is(received, world.rank + 1)


def _gather(world: World, dtype: torch.dtype) -> bool:
    parts = [_empty(world, dtype) for _ in range(world.world_size)] if world.rank == 0 else None
    dist.gather(_mine(world, dtype), parts, dst=0)
    return all(_is(part, rank + 1) for rank, part in enumerate(parts or []))


def _sum(world: World) -> int:
    return world.world_size * (world.world_size + 1) // 2


def _reduce(world: World, dtype: torch.dtype) -> bool:
    """Check the sum on rank 0; other ranks' output is undefined."""
    tensor = _mine(world, dtype)
    dist.reduce(tensor, dst=0)
    return world.rank != 0 or _is(tensor, _sum(world))


def _all_reduce(world: World, dtype: torch.dtype) -> bool:
    tensor = _mine(world, dtype)
    dist.all_reduce(tensor)
    return _is(tensor, _sum(world))


def _all_gather(world: World, dtype: torch.dtype) -> bool:
    parts = [_empty(world, dtype) for _ in range(world.world_size)]
    dist.all_gather(parts, _mine(world, dtype))
    return all(_is(part, rank + 1) for rank, part in enumerate(parts))


def _reduce_scatter(world: World, dtype: torch.dtype) -> bool:
    received = _empty(world, dtype)
    dist.reduce_scatter(received, [_mine(world, dtype) for _ in range(world.world_size)])
    return _is(received, _sum(world))


def _all_to_all(world: World, dtype: torch.dtype) -> bool:
    received = _empty(world, dtype, _COUNT * world.world_size)
    dist.all_to_all_single(received, _mine(world, dtype, _COUNT * world.world_size))
    return all(_is(part, rank + 1) for rank, part in enumerate(received.chunk(world.world_size)))


def _barrier(world: World, dtype: torch.dtype) -> bool:
    """A barrier has no result: it works if it returns."""
    dist.barrier()
    return True


COLLECTIVES: Mapping[str, Attempt] = {
    "send and recv": _send_recv,
    "broadcast": _broadcast,
    "scatter": _scatter,
    "gather": _gather,
    "reduce": _reduce,
    "all-reduce": _all_reduce,
    "all-gather": _all_gather,
    "reduce-scatter": _reduce_scatter,
    "all-to-all": _all_to_all,
    "barrier": _barrier,
}
ALONE = frozenset(COLLECTIVES) - {"send and recv"}  # collectives that one rank can try: none with a peer


def dtypes_of(collective: str) -> Sequence[torch.dtype]:
    """Return the dtypes to try a collective with; a barrier has no tensor and is tried once."""
    return DTYPES if collective != "barrier" else DTYPES[:1]


def notes_of(folder: Path, rank: int) -> Path:
    """Return the file in which a rank writes a line before and after each attempt."""
    return folder / f"rank-{rank}.jsonl"


def try_all(folder: str, device: DeviceChoice) -> None:
    """Try every collective with every dtype, as one of the ranks started for it."""
    with (
        join(device=device, threads=1) as world,
        notes_of(Path(folder), world.rank).open("w", encoding="utf-8", buffering=1) as notes,
    ):
        for collective, attempt in COLLECTIVES.items():
            if world.world_size == 1 and collective not in ALONE:
                continue
            for dtype in dtypes_of(collective):
                name = {"collective": collective, "dtype": str(dtype).removeprefix("torch.")}
                notes.write(json.dumps(name) + "\n")
                notes.write(json.dumps({**name, **_outcome(attempt, world, dtype)}) + "\n")


def _outcome(attempt: Attempt, world: World, dtype: torch.dtype) -> dict[str, Any]:
    """Run an attempt; return whether its result is right, and the reason if not."""
    try:
        right = attempt(world, dtype)
    except Exception as error:
        return {"works": False, "reason": str(error).partition("\n")[0]}
    return {"works": right, "reason": None if right else "a wrong result"}


_RANKS = 2


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The back end, device and number of ranks to try."""

    backend: str
    device: DeviceChoice
    ranks: int


def trials() -> list[Trial]:
    """Return a trial on the CPU, and one on the accelerators if there are any, one rank on each."""
    found = [Trial(backend="gloo", device="cpu", ranks=_RANKS)]
    if there := accelerators():
        backend = backend_of(device_of(0)).rpartition(":")[2]
        found.append(Trial(backend=backend, device="auto", ranks=min(_RANKS, there)))
    return found


def collectives(trial: Trial, limit: float) -> Iterator[Finding]:
    """Start the ranks, and report which collectives gave the right result with which dtypes."""
    with tempfile.TemporaryDirectory(prefix="samestep-doctor-") as name:
        folder = Path(name)
        outcome = run_ranks(try_all, (str(folder), trial.device), trial.ranks, limit=limit)
        notes = [read_notes(notes_of(folder, rank)) for rank in range(trial.ranks)]
    yield _finding(trial, outcome, notes, limit)


def _finding(trial: Trial, outcome: Outcome, notes: list[list[dict[str, Any]]], limit: float) -> Finding:
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


def _stuck(outcome: Outcome, notes: list[list[dict[str, Any]]], limit: float) -> str:
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
