"""Faults that a soak injects from outside a running job, and how it finds the job's processes.

A `Target` is a job that runs: on this host (`Processes`), or wherever who soaks has started it. Kinds that want
several hosts say so; `samestep drill` starts none, and benchmarks/soak_hosts.py of the repository does.
"""

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import gettempdir
from typing import NamedTuple, Protocol

import psutil

from samestep.errors import UserError, closest
from samestep.fault_tolerance.status import read
from samestep.job import Fault
from samestep.run_folder import METRICS_FILE

_PAUSE = 1.0  # seconds
_STEPS_WITHIN = 2.0  # seconds in which a rank begins another step, if it takes any
_BACK_AFTER = (1.0, 10.0)  # seconds until a crashed host boots again
_PLUGGED_AFTER = (1.0, 20.0)  # seconds without network: ranks survive short breaks, longer ones lose the host
_ROUNDS = "samestep-agent-*/round-*"  # where ranks write their status files


class JobHosts(Protocol):
    """The hosts of a multi-host job, by the names that the job uses."""

    def there(self) -> Sequence[str]:
        """Return the hosts that are up, connected, and part of the training now."""
        ...

    def crash(self, host: str) -> None:
        """Kill all processes on a host at once."""
        ...

    def boot(self, host: str) -> None: ...

    def unplug(self, host: str) -> None: ...

    def plug(self, host: str) -> None: ...


class Target(Protocol):
    """A running job."""

    @property
    def hosts(self) -> JobHosts | None:
        """The job's hosts; None for a single-host job."""
        ...

    def poll(self) -> int | None:
        """Return the job's exit code; None while it runs."""
        ...

    def last_step(self) -> int:
        """Return the last recorded step; -1 if there is none yet."""
        ...

    def ranks(self) -> Mapping[int, int]:
        """Return the process id of each training rank."""
        ...

    def fault_file(self, rank: int, fault: Fault) -> Path:
        """Return the file whose existence makes a rank commit a fault in its next step; the rank removes it."""
        ...

    def tree(self) -> Sequence[int]:
        """Return the ids of all its processes."""
        ...

    def terminate(self) -> None:
        """Send SIGTERM to the process that was started."""
        ...

    def kill_supervisor(self) -> None:
        """Kill the process that was started, which supervises the ranks, alone."""
        ...

    def kill(self) -> None:
        """Kill all its processes at once."""
        ...


class Processes:
    """A job on this host, given its first process."""

    hosts = None

    def __init__(self, started: subprocess.Popen[bytes], folder: Path, processes: int) -> None:
        """`folder`: the run's folder."""
        self.started = started
        self._folder = folder
        self._processes = processes

    def poll(self) -> int | None:
        return self.started.poll()

    def last_step(self) -> int:
        return last_step_in(self._folder / METRICS_FILE)

    def ranks(self) -> Mapping[int, int]:
        """Return the process ids, by rank, of this run's live ranks."""
        pids = set(self.tree())
        places = Path(gettempdir()).glob(_ROUNDS)
        statuses = (status for place in places for status in read(place, range(self._processes)))
        return {status.rank: status.pid for status in statuses if status.pid in pids and not status.over}

    def fault_file(self, rank: int, fault: Fault) -> Path:
        return fault_file(self._folder, rank, fault)

    def tree(self) -> Sequence[int]:
        """Return the started process and all its descendants."""
        pids = [self.started.pid]
        with suppress(psutil.NoSuchProcess):
            pids += [child.pid for child in psutil.Process(self.started.pid).children(recursive=True)]
        return pids

    def terminate(self) -> None:
        self.started.send_signal(signal.SIGTERM)

    def kill_supervisor(self) -> None:
        self.started.kill()

    def kill(self) -> None:
        for pid in self.tree():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def fault_file(folder: Path, rank: int, fault: Fault) -> Path:
    """Return the file, next to a run's folder, that makes a rank commit a fault."""
    return folder.with_name(f"{folder.name}-{fault}-{rank}")


def last_step_in(metrics: Path) -> int:
    """Read the last recorded step; reads only the end of the file, which grows long."""
    try:
        with metrics.open("rb") as content:
            content.seek(max(0, metrics.stat().st_size - 4096))
            tail = content.read().decode("utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return -1
    steps = [part.split(",")[0] for part in (line.partition('"step": ')[2] for line in tail) if part]
    return max((int(step) for step in steps if step.isdecimal()), default=-1)


class Undo(NamedTuple):
    """The action that reverts a fault, and its delay."""

    after: float  # seconds
    do: Callable[[], object]


_NOTHING = Undo(0.0, lambda: None)

# Commits a fault; None where it can't be committed now.
Commit = Callable[[Target, random.Random], Undo | None]


def _signalled(number: signal.Signals, undo: signal.Signals | None = None) -> Commit:
    """Return a disturbance that signals a random rank, and reverts it by the signal `undo` if given."""

    def commit(target: Target, draw: random.Random) -> Undo | None:
        ranks = target.ranks()
        if not ranks:
            return None
        pid = ranks[draw.choice(sorted(ranks))]
        if not _sent(pid, number):
            return None
        if undo is None:
            return _NOTHING
        again = undo
        return Undo(_PAUSE, lambda: _sent(pid, again))

    return commit


def _sent(pid: int, number: signal.Signals) -> bool:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False


def _injected(fault: Fault) -> Commit:
    """Return a disturbance that a random rank commits itself, once the file is there that its injection waits for."""

    def commit(target: Target, draw: random.Random) -> Undo | None:
        ranks = target.ranks()
        if not ranks:
            return None
        file = target.fault_file(draw.choice(sorted(ranks)), fault)
        file.touch()
        until = time.monotonic() + _STEPS_WITHIN
        while file.exists():
            if time.monotonic() > until or target.poll() is not None:
                with suppress(FileNotFoundError):
                    file.unlink()
                    return None
            time.sleep(0.002)
        return _NOTHING

    return commit


def _terminate(target: Target, draw: random.Random) -> Undo:
    target.terminate()
    return _NOTHING


def _kill_supervisor(target: Target, draw: random.Random) -> Undo:
    target.kill_supervisor()
    return _NOTHING


def _gone(target: Target, draw: random.Random) -> Undo:
    target.kill()
    return _NOTHING


def _host_gone(target: Target, draw: random.Random) -> Undo | None:
    """Crash a random host; it boots again some seconds later."""
    host = _one_of(target, draw)
    if host is None or target.hosts is None:
        return None
    target.hosts.crash(host)
    hosts = target.hosts
    return Undo(draw.uniform(*_BACK_AFTER), lambda: hosts.boot(host))


def _cable(target: Target, draw: random.Random) -> Undo | None:
    """Disconnect a random host; it is connected again some seconds later."""
    host = _one_of(target, draw)
    if host is None or target.hosts is None:
        return None
    target.hosts.unplug(host)
    hosts = target.hosts
    return Undo(draw.uniform(*_PLUGGED_AFTER), lambda: hosts.plug(host))


def _one_of(target: Target, draw: random.Random) -> str | None:
    """Choose a random host; None if it is the only one, so that none would go on."""
    there = target.hosts.there() if target.hosts is not None else []
    return draw.choice(sorted(there)) if len(there) > 1 else None


@dataclass(frozen=True, kw_only=True)
class Disturbance:
    """A kind of fault."""

    does: str
    commit: Commit
    ends_job: bool = False  # the job must be started again after it, as a scheduler does
    of_hosts: bool = False  # needs a multi-host job
    fewest_ranks: int = 1


KINDS: Mapping[str, Disturbance] = {
    "kill": Disturbance(does="a rank gets SIGKILL", commit=_signalled(signal.SIGKILL)),
    "crash": Disturbance(does="a rank gets SIGABRT", commit=_signalled(signal.SIGABRT)),
    "raise": Disturbance(does="a rank raises in its next step", commit=_injected("raise")),
    "hang": Disturbance(does="a rank is stopped for good", commit=_signalled(signal.SIGSTOP)),
    "deadlock": Disturbance(
        does="a rank holds Python's interpreter lock for good", commit=_injected("deadlock"), fewest_ranks=2
    ),
    "abort": Disturbance(does="a rank aborts its communicators", commit=_injected("abort"), fewest_ranks=2),
    "pause": Disturbance(
        does="a rank is stopped for a second", commit=_signalled(signal.SIGSTOP, undo=signal.SIGCONT)
    ),
    "terminate": Disturbance(does="the job gets SIGTERM, and is started again", commit=_terminate, ends_job=True),
    "supervisor": Disturbance(
        does="the process that supervises the ranks gets SIGKILL, alone, and the job is started again",
        commit=_kill_supervisor,
        ends_job=True,
    ),
    "gone": Disturbance(does="all processes get SIGKILL, and the job is started again", commit=_gone, ends_job=True),
    "host": Disturbance(does="all of a host is killed, and it comes back", commit=_host_gone, of_hosts=True),
    "cable": Disturbance(does="a host's cable is pulled, and put back", commit=_cable, of_hosts=True),
}


# Faults that a rank commits itself on request: of the kinds above, by the same names.
INJECTED: Sequence[Fault] = ("raise", "deadlock", "abort")


def kinds_of(names: Sequence[str] | None, *, ranks: int, hosts: bool = False) -> list[str]:
    """Return the named kinds; without names, all that apply to a job of `ranks` ranks. `hosts`: multi-host.

    Raises UserError.
    """
    possible = [name for name, kind in KINDS.items() if (hosts or not kind.of_hosts) and ranks >= kind.fewest_ranks]
    chosen = [name.strip() for name in names] if names is not None else possible
    for name in chosen:
        if name not in KINDS:
            raise UserError(f'unknown fault "{name}" of a soak; {closest(name, possible)}')
        if (fewest := KINDS[name].fewest_ranks) > ranks:
            raise UserError(f'fault "{name}" of a soak wants {fewest} processes; use layout dp{fewest}')
        if name not in possible:
            raise UserError(
                f'fault "{name}" of a soak wants several hosts, and drill starts one; use {", ".join(possible)}, or '
                "benchmarks/soak_hosts.py of the repository, which makes hosts"
            )
    return chosen
