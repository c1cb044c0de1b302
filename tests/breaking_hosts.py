"""Jobs on hosts that a test breaks: started over SSH, waited for, and the time limits that govern what follows."""

import time
from collections.abc import Sequence
from pathlib import Path

from on_hosts import VARIABLES, python
from small_jobs import steps_in, wait_until
from testbed import Running, Testbed

from samestep.launch.options import LaunchTimeouts

_LIMITS = LaunchTimeouts()
_GATHER = f"hosts gather for {_LIMITS.later_join_timeout:g} s"

# What governs how soon a job goes on after a host has crashed, and after one has fallen silent.
WHEN_CLOSED = f"no heartbeat for {_LIMITS.meeting_silence:g} s; {_GATHER}"
WHEN_SILENT = f"--heartbeat-timeout {_LIMITS.heartbeat_timeout:g} s; {_GATHER}"
# And how long it takes nobody for lost, and how soon it ends where the store is silent.
SILENCE = f"--heartbeat-timeout {_LIMITS.heartbeat_timeout:g} s"
WITHOUT_STORE = f"--heartbeat-timeout {_LIMITS.heartbeat_timeout:g} s; --rejoin-timeout {_LIMITS.rejoin_timeout:g} s"

# Seconds to the next step after a rank or a host was killed, and after a host has fallen silent.
PROMISED_WHEN_KILLED = 10.0
PROMISED = 20.0
ENOUGH = 2 * _LIMITS.heartbeat_timeout  # seconds in which a host would have been taken for lost


def controller(
    bed: Testbed, folder: Path, job: Path, *options: str, every: int = 2, on: Sequence[str] = ("host-a", "host-b")
) -> Running:
    """The job on some hosts, a rank on each, started over SSH from the last host."""
    hosts = folder / "hosts"
    hosts.write_text("".join(f"{host} slots=1\n" for host in on))
    train = ["-m", "samestep", "train", str(job), "--folder", str(folder / "run")]
    train += ["--checkpoint-every", str(every), "--set", "run.checkpoint.resume=auto"]
    start = python("samestep", "launch", "--hostfile", str(hosts), *options)
    return bed.hosts[-1].start([*start, "--", *train], env=VARIABLES, cwd=folder)


def wait_for_step(step: int, run: Path, running: Running, limit: float = 60.0) -> float:
    """Wait until a run has taken so many steps; seconds that it took."""

    def taken() -> bool:
        assert running.poll() is None, running.text
        return steps_in(run) >= step

    return wait_until(taken, limit, told=lambda: f"step {steps_in(run)}\n{running.text}")


def wait_for_text(text: str, running: Running, limit: float = 60.0, *, times: int = 1) -> float:
    """Wait until a command has printed something so many times; seconds that it took."""

    def printed() -> bool:
        found = running.text.count(text) >= times
        assert found or running.poll() is None, running.text
        return found

    return wait_until(printed, limit, told=lambda: running.text)


def gone_on_after(running: Running, *, faults: int = 1) -> float:
    """Seconds from now to the first step of ranks that were started again, after so many faults of the whole job."""
    return wait_for_text("s to the next step", running, times=faults)


def ended_after(running: Running, limit: float = 60.0) -> tuple[int, float]:
    """A command's exit code, and the seconds from now to its end."""
    began = time.monotonic()
    code = running.wait(limit)
    return code, time.monotonic() - began
