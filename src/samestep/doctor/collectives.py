"""Each collective, tried by every rank, with a result that is known beforehand. Run in ranks of the doctor's own.

Rank r of n sends r + 1, of which small sums are exact in every type.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.cluster.device import DeviceChoice
from samestep.cluster.world import World, join

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64)
_COUNT = 5  # elements of a message; odd, so that nothing is split evenly by luck

Attempt = Callable[[World, torch.dtype], bool]  # whether the result is right


def _mine(world: World, dtype: torch.dtype, count: int = _COUNT) -> Tensor:
    return torch.full([count], world.rank + 1, dtype=dtype, device=world.device)


def _empty(world: World, dtype: torch.dtype, count: int = _COUNT) -> Tensor:
    return torch.zeros(count, dtype=dtype, device=world.device)


def _is(tensor: Tensor, value: int) -> bool:
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
ALONE = frozenset(COLLECTIVES) - {"send and recv"}  # what a single rank can try: nobody sends to itself


def dtypes_of(collective: str) -> Sequence[torch.dtype]:
    return DTYPES if collective != "barrier" else DTYPES[:1]


def notes_of(folder: Path, rank: int) -> Path:
    """Where a rank writes down a line before each attempt, and one when it is over."""
    return folder / f"rank-{rank}.jsonl"


def try_all(folder: Path, device: DeviceChoice) -> None:
    """Try everything as one of the ranks that were started for it."""
    with (
        join(device=device, threads=1) as world,
        notes_of(folder, world.rank).open("w", encoding="utf-8", buffering=1) as notes,
    ):
        for collective, attempt in COLLECTIVES.items():
            if world.world_size == 1 and collective not in ALONE:
                continue
            for dtype in dtypes_of(collective):
                name = {"collective": collective, "dtype": str(dtype).removeprefix("torch.")}
                notes.write(json.dumps(name) + "\n")
                notes.write(json.dumps({**name, **_outcome(attempt, world, dtype)}) + "\n")


def _outcome(attempt: Attempt, world: World, dtype: torch.dtype) -> dict[str, Any]:
    try:
        right = attempt(world, dtype)
    except Exception as error:
        return {"works": False, "reason": str(error).partition("\n")[0]}
    return {"works": right, "reason": None if right else "a wrong result"}
