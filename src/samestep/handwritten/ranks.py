"""Starts handwritten ranks by torch.multiprocessing.spawn, and runs a rank that this or a launcher started."""

import sys
import traceback
from pathlib import Path
from tempfile import TemporaryDirectory

from torch.multiprocessing.spawn import spawn

from samestep.errors import USERS_MISTAKE, UserError
from samestep.handwritten import FAILED, REFUSED
from samestep.jobfile import load
from samestep.ranks import Ranks


def spawn_ranks(job: Path, folder: Path, processes: int) -> None:
    """Start ranks by torch.multiprocessing.spawn, and wait for all of them."""
    with TemporaryDirectory(prefix="samestep-spawn-") as meeting:
        # A FileStore: needs no port, which another job could take.
        store = f"file://{Path(meeting).resolve()}/store"
        spawn(_spawned, (processes, job, folder, store), nprocs=processes)


def _spawned(rank: int, processes: int, job: Path, folder: Path, store: str) -> None:
    """Run one spawned rank."""
    code = run_rank(
        job, folder, Ranks(rank=rank, world_size=processes, local_rank=rank, local_world_size=processes), store
    )
    if code:
        raise SystemExit(code)


def run_rank(job: Path, folder: Path, ranks: Ranks, meet_at: str | None = None) -> int:
    """Train as one rank; return the exit code. The reason of a failure is left in `folder`."""
    # Not imported by the process that spawns the ranks, which waits for them and needs no model.
    from samestep.handwritten.training import train

    try:
        train(load(job).job, folder, ranks=ranks, meet_at=meet_at)
    except UserError as error:
        if ranks.rank == 0:
            print(f"samestep: {error}", file=sys.stderr)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / REFUSED).write_text(str(error), encoding="utf-8")
        return USERS_MISTAKE
    except Exception:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{FAILED}{ranks.rank}.txt").write_text(traceback.format_exc(), encoding="utf-8")
        raise
    return 0
