"""How a method's processes are started: the command of each way."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from samestep.handwritten import PRECISIONS

Command = Callable[[Path, Path, int], Sequence[str]]  # job file, the run's folder, processes


@dataclass(frozen=True, kw_only=True)
class Start:
    """A way to start processes; each makes rank 0 leave the run in the folder it is given."""

    name: str
    command: Command
    # What the started program computes in, where it is not an engine that says so.
    precisions: frozenset[str] | None = None
    compiles: bool = True  # whether it takes run.compile


_LOOP = ["-m", "samestep.handwritten"]


def _train(job: Path, folder: Path, processes: int) -> Sequence[str]:
    return [sys.executable, "-m", "samestep", "train", str(job), "--folder", str(folder)]


def _alone(job: Path, folder: Path, processes: int) -> Sequence[str]:
    return [sys.executable, *_LOOP, str(job), "--folder", str(folder)]


def _spawn(job: Path, folder: Path, processes: int) -> Sequence[str]:
    return [*_alone(job, folder, processes), "--spawn", str(processes)]


def _by_launcher(module: str) -> Command:
    def command(job: Path, folder: Path, processes: int) -> Sequence[str]:
        ranks = ["--standalone", f"--nproc-per-node={processes}"]  # standalone: a free port
        return [sys.executable, "-m", module, *ranks, *_LOOP, str(job), "--folder", str(folder)]

    return command


SAMESTEP = Start(name="samestep", command=_train)
HANDWRITTEN = Start(name="python", command=_alone, precisions=PRECISIONS)
SPAWN = Start(name="torch.multiprocessing.spawn", command=_spawn, precisions=PRECISIONS)
TORCHRUN = Start(name="torchrun", command=_by_launcher("torch.distributed.run"), precisions=PRECISIONS)
LAUNCH = replace(TORCHRUN, name="torch.distributed.launch", command=_by_launcher("torch.distributed.launch"))
