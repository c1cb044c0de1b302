"""Starts ranks by forking a process that has imported PyTorch: the zoo's many small runs take a second each."""

import multiprocessing.util
import os
import signal
import sys
import time
import traceback
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress

import torch
import torch.distributed
import torch.distributed.device_mesh
import torch.distributed.fsdp
import torch.distributed.optim
import torch.nn.parallel
import torch.utils.checkpoint
import torch.utils.data.distributed

from samestep.script_proof import runner
from samestep.script_proof.forked import free_port
from samestep.script_proof.runs import ScriptProof, ScriptStart
from samestep.subprocess_group import CommandOutcome

_MOST_RANKS = 4  # at the same time


def forked(starts: Sequence[ScriptStart], proof: ScriptProof) -> list[CommandOutcome]:
    """Runs at the same time, as far as they have four ranks together: each a fork of this process."""
    outcomes: list[CommandOutcome] = []
    waiting = list(starts)
    while waiting:
        now = [waiting.pop(0)]
        while waiting and sum(start.ranks for start in (*now, waiting[0])) <= _MOST_RANKS:
            now.append(waiting.pop(0))
        outcomes += _together(now, proof)
        if any(outcome.code != 0 for outcome in outcomes):
            break
    return outcomes


def _together(starts: Sequence[ScriptStart], proof: ScriptProof) -> list[CommandOutcome]:
    began = time.monotonic()
    ranks = {start.name: _ranks(start, proof) for start in starts}
    waiting = {pid for pids in ranks.values() for pid in pids}
    codes: dict[int, int] = {}
    failed_at: float | None = None
    try:
        while waiting and time.monotonic() - began < proof.time_limit:
            for pid in list(waiting):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    waiting.discard(pid)
                    codes[pid] = os.waitstatus_to_exitcode(status)
                    if codes[pid] != 0 and failed_at is None:
                        failed_at = time.monotonic()
            if failed_at is not None and time.monotonic() - failed_at > 1.0:
                break
            time.sleep(0.01)
    finally:
        for pid in waiting:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
    return [_outcome(start, [codes.get(pid) for pid in ranks[start.name]], failed_at is not None) for start in starts]


def _outcome(start: ScriptStart, codes: Sequence[int | None], failed: bool) -> CommandOutcome:
    code = next((code for code in codes if code), 0 if None not in codes or failed else None)
    files = [start.place / f"output-{rank}.txt" for rank in range(start.ranks)]
    # A rank that is ended by the time limit may not have come to write.
    texts = [file.read_text(errors="replace") for file in files if file.is_file()]
    return CommandOutcome(code=code, seconds=0.0, output="\n".join(texts))


def _ranks(start: ScriptStart, proof: ScriptProof) -> list[int]:
    port = free_port()
    return [_rank(start, proof, rank, port) for rank in range(start.ranks)]


def _rank(start: ScriptStart, proof: ScriptProof, rank: int, port: int) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    # What is to be removed at the end of the process it came from is not this one's.
    multiprocessing.util._finalizer_registry.clear()  # pyright: ignore[reportAttributeAccessIssue]
    weakref.finalize._registry.clear()  # pyright: ignore[reportAttributeAccessIssue]
    try:
        _become(start, rank, _variables(start, proof, rank, port))
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        # Removes the semaphores that this rank has made.
        multiprocessing.util._exit_function()  # pyright: ignore[reportAttributeAccessIssue]
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _become(start: ScriptStart, rank: int, variables: Mapping[str, str]) -> None:
    output = os.open(start.place / f"output-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(variables)
    torch.set_num_threads(1)
    runner.main(start.rank_command[1:])


def _variables(start: ScriptStart, proof: ScriptProof, rank: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(start.ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(start.ranks),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": f"samestep-{start.name}-{port}",
        "OMP_NUM_THREADS": "1",
        **({"ACCELERATE_USE_CPU": "true"} if proof.engine == "accelerate" else {}),
    }
