"""Fault injection: faults that a rank commits on purpose, in the step that the job says."""

import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from samestep.job import Inject
from samestep.torch_internals.groups import all_groups

_ROOM = 128 * 2**20  # bytes that may still be taken
_BLOCK = 16 * 2**20


def run_out_of_memory() -> None:
    """Allocate until there is no more. Always raises MemoryError, and leaves the limit as it was."""
    if sys.platform != "linux":
        raise MemoryError("planted: no memory is left (this system can't limit a process)")
    held = psutil.Process().memory_info().vms  # bytes of address space
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (held + _ROOM, hard))
    taken: list[bytearray] = []
    try:
        while len(taken) * _BLOCK <= _ROOM:
            taken.append(bytearray(_BLOCK))
        raise MemoryError("planted: all memory is taken")
    finally:
        taken.clear()
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


class InjectedFaultError(RuntimeError):
    """What `fault: raise` raises."""


class Injection:
    """The injected faults of this rank in this round."""

    def __init__(self, faults: Sequence[Inject], rank: int, number: int) -> None:
        """`number`: the round's. Faults are for round 0, unless meant for every round or triggered by a file."""
        later = number > 0
        self._mine = [
            fault
            for fault in faults
            if fault.rank == rank and (not later or fault.every_round or fault.when is not None)
        ]
        self._done: set[int] = set()

    def before(self, step: int) -> None:
        """Commit the faults that are due before a step."""
        for index, fault in enumerate(self._mine):
            if fault.fault == "slow":
                if step >= fault.step:
                    time.sleep(fault.seconds)
            elif fault.when is not None:
                if step >= fault.step and _taken_away(fault.when):
                    _FAULTS[fault.fault](fault, step)
            elif fault.step == step and fault.fault in _FAULTS and index not in self._done:
                self._done.add(index)  # commit once: after a rollback the step is taken again
                _FAULTS[fault.fault](fault, step)

    def spoils(self, step: int) -> bool:
        """Whether to make the loss of a step NaN; True once for each such fault."""
        spoiled = False
        for index, fault in enumerate(self._mine):
            if fault.fault == "nan" and fault.step == step and index not in self._done:
                self._done.add(index)
                spoiled = True
        return spoiled

    def __bool__(self) -> bool:
        return bool(self._mine)


def _taken_away(file: Path) -> bool:
    """Remove the file; return whether it existed."""
    try:
        file.unlink()
    except FileNotFoundError:
        return False
    return True


def _raise(fault: Inject, step: int) -> None:
    raise InjectedFaultError(f"planted in rank {fault.rank} at step {step} by run.inject")


def _kill(fault: Inject, step: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _hang(fault: Inject, step: int) -> None:
    while True:
        time.sleep(1)


def _oom(fault: Inject, step: int) -> None:
    run_out_of_memory()


def _deadlock(fault: Inject, step: int) -> None:
    """Hold Python's interpreter lock for good, as native code does that waits for a thread which needs it.

    No Python code of this process runs any more: neither its threads nor its handlers of signals.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # a signal would end `pause`
    ctypes.PyDLL(None).pause()  # of libc; PyDLL keeps the lock during a call


def _abort(fault: Inject, step: int) -> None:
    """Abort this rank's communicators, as NCCL's watchdog does: collectives on them raise, here and on the others."""
    for group in all_groups():
        group.abort()


_FAULTS: Mapping[str, Callable[[Inject, int], None]] = {
    "kill": _kill,
    "raise": _raise,
    "hang": _hang,
    "oom": _oom,
    "deadlock": _deadlock,
    "abort": _abort,
}
