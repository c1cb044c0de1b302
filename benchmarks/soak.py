"""A long training under random faults with torchrun at its best settings: how far it gets, and with which weights.

    python benchmarks/soak.py --faults 100 --between 1 --seed 1

Beside `samestep drill --soak`, with the same kinds of faults drawn in the same way. The script saves after every
step and resumes by itself. torchrun has as many restarts as it wants, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, without
which a restart with gloo may read the old round's addresses, and a process group that gives up after 10 s. Where it
ends with an error it is started again by the same command. It is given up where no step comes for a minute.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import torch
from notes import noted

from samestep.drill.soak import KINDS, Target

HERE = Path(__file__).resolve().parent
BATCH, STEP_SECONDS = 16, 0.02
GROUP_LIMIT = 10.0  # seconds; the hang limit of samestep's soak
STUCK = 60.0  # seconds without a step, after which it is given up


class Workers(Target):
    """The processes of torchrun; its workers are the ranks."""

    def ranks(self) -> list[int]:
        return [pid for pid in self.tree() if pid != self.started.pid and _is_worker(pid)]


def _is_worker(pid: int) -> bool:
    try:
        return any(word.endswith("noted_plain.py") for word in psutil.Process(pid).cmdline())
    except psutil.Error:
        return False


@dataclass(kw_only=True)
class Soaked:
    """How far torchrun came."""

    wanted: int
    seed: int
    between: float
    processes: int
    faults: Counter[str] = field(default_factory=Counter)
    survived: int = 0  # faults after which a step was taken: all but the last, where it is given up
    started_again: int = 0  # by the same command, as a scheduler would
    ended: bool = False
    why: str = ""
    same_weights: bool | None = None


def command(folder: Path, steps: int, processes: int) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    values = ["--steps", str(steps), "--batch", str(BATCH), "--step-seconds", str(STEP_SECONDS)]
    script = [str(HERE / "noted_plain.py"), str(folder), *values, "--group-limit", str(GROUP_LIMIT)]
    return [*launcher, "--max-restarts=100000", "--monitor-interval=0.1", *script]


def environment() -> Mapping[str, str]:
    return {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}


def undisturbed(folder: Path, steps: int, processes: int) -> dict[str, Any]:
    folder.mkdir()
    subprocess.run(command(folder, steps, processes), env=environment(), check=True, capture_output=True)
    return weights(folder)


def weights(folder: Path) -> dict[str, Any]:
    return torch.load(folder / "checkpoint.pt", weights_only=True)["model"]


def last_step(folder: Path) -> float:
    """When the last step was taken."""
    return max((times[-1] for times in noted(folder).values()), default=0.0)


def soak(folder: Path, steps: int, found: Soaked, draw: random.Random) -> None:
    folder.mkdir()
    while True:
        started = subprocess.Popen(
            command(folder, steps, found.processes),
            env=environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            stuck = _disturb(started, folder, found, draw)
        finally:
            _end(started, folder)
        if stuck or started.returncode == 0:
            found.ended = not stuck
            found.survived = found.faults.total() - stuck
            found.why = f"no step for {STUCK:g} s after {found.why}" if stuck else ""
            return
        found.started_again += 1


def _disturb(started: subprocess.Popen[bytes], folder: Path, found: Soaked, draw: random.Random) -> bool:
    """Commit a fault some time after the first step since the last one, until it ends, or is stuck: then True."""
    target, seen, since = Workers(started, found.processes), last_step(folder), time.monotonic()
    due: float | None = None
    while started.poll() is None:
        if (now := last_step(folder)) > seen:
            seen, since = now, time.monotonic()
            due = _next(draw, found) if due is None else due
        if time.monotonic() - since > STUCK:
            return True
        if due is not None and time.monotonic() >= due and found.faults.total() < found.wanted:
            kind = draw.choice(list(KINDS))
            if KINDS[kind].commit(target, draw):
                found.faults[kind] += 1
                found.why, seen, due = kind, time.time(), None
        time.sleep(0.05)
    return False


def _next(draw: random.Random, found: Soaked) -> float:
    return time.monotonic() + draw.uniform(0.5, 1.5) * found.between


def _end(started: subprocess.Popen[bytes], folder: Path) -> None:
    """What is left of it, also workers that were stopped: all that have this folder among their arguments."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if str(folder) in process.cmdline():
                process.kill()
    started.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--between", type=float, default=1.0, metavar="S")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args()
    found = Soaked(wanted=given.faults, seed=given.seed, between=given.between, processes=given.processes)
    steps = max(40, int(1.5 * given.faults * given.between / STEP_SECONDS))
    with TemporaryDirectory(prefix="samestep-soak-") as place:
        known = undisturbed(Path(place) / "undisturbed", steps, given.processes)
        began = time.monotonic()
        soak(Path(place) / "soak", steps, found, random.Random(given.seed))
        seconds = time.monotonic() - began
        if found.ended:
            mine = weights(Path(place) / "soak")
            found.same_weights = all(mine[name].equal(value) for name, value in known.items())
    values = {**asdict(found), "faults": dict(found.faults), "seconds": seconds}
    print(json.dumps(values, indent=2))
    if given.json is not None:
        given.json.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
