"""Starts the runs of a script's proof by torchrun: nothing of samestep but the prover has to be installed."""

import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from samestep import environment, subprocess_group
from samestep.progress import phases
from samestep.script_proof.runs import LOGS, ScriptProof, ScriptStart
from samestep.subprocess_group import CommandOutcome
from samestep.variables import DEVICE_VARIABLES

# torchrun's last words: which rank failed first. They come after all that ranks wrote.
_ROOT_CAUSE = re.compile(r"Root Cause.*?^\s*rank\s*: (\d+) ", re.DOTALL | re.MULTILINE)


def by_torchrun(starts: Sequence[ScriptStart], proof: ScriptProof) -> list[CommandOutcome]:
    """Start runs one after the other, each by torchrun on this host."""
    outcomes: list[CommandOutcome] = []
    for start in starts:
        phases.say(f"{start.name}: {start.title}")
        with phases.status(start.status), environment.given(variables_of(proof.device)):
            outcome = subprocess_group.run(_command(start), limit=proof.time_limit)
        outcomes.append(replace(outcome, output=_output(start.place / LOGS, outcome)))
        if outcome.code != 0:
            break
    return outcomes


def _command(start: ScriptStart) -> list[str]:
    # A port that the system chooses, so that other jobs on this host don't meet this one.
    meet = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--nnodes", "1")
    return [
        *(sys.executable, "-m", "torch.distributed.run", *meet, "--nproc-per-node", str(start.ranks)),
        *("--log-dir", str(start.place / LOGS), "--redirects", "3"),
        *("-m", *start.rank_command),
    ]


def variables_of(device: str) -> dict[str, str]:
    """Of the ranks: one thread each, so that a run alone sums in the order of the split one; and which devices."""
    hidden = dict.fromkeys(DEVICE_VARIABLES, "") | {"ACCELERATE_USE_CPU": "true"} if device == "cpu" else {}
    return {"OMP_NUM_THREADS": "1", **hidden}


def _output(logs: Path, outcome: CommandOutcome) -> str:
    """What ranks wrote; of a run that failed, what the rank wrote that failed first."""
    of_rank = {rank: _text(logs, rank, "stdout") + _text(logs, rank, "stderr") for rank in _ranks(logs)}
    if outcome.code == 0 or not of_rank:
        return "".join(of_rank.values()) or outcome.output
    root = _ROOT_CAUSE.search(outcome.output)
    rank = int(root[1]) if root is not None else min(of_rank)
    return of_rank.get(rank) or outcome.output


def _ranks(logs: Path) -> list[int]:
    return sorted({int(path.parent.name) for path in logs.rglob("stderr.log") if path.parent.name.isdigit()})


def _text(logs: Path, rank: int, stream: str) -> str:
    files = logs.rglob(f"{rank}/{stream}.log")
    return "".join(file.read_text(encoding="utf-8", errors="replace") for file in files)
