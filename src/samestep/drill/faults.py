"""The faults that are drilled: a class each, and their table at the end.

Faults of a rank, after which all ranks are restarted, are injected by the job itself. After a signal a job saves and
ends, and the same command is run once more, as a scheduler does.
"""

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from samestep.drill.disturbances import Processes
from samestep.drill.drill import Drill, FaultOutcome, Runs
from samestep.drill.under_faults import still_there
from samestep.fault_tolerance.nonfinite import left_out
from samestep.job import Fault, Inject

_A_STEP = 0.25  # seconds that steps are slowed down by, so that the signal comes before the last one
_AFTER = 2  # the step after which it is sent


def requeued(runs: Runs, name: str, number: signal.Signals, *, to_the_group: bool) -> FaultOutcome:
    """Send a signal in the middle of a training, and start the job again if it ended with 128 + the signal."""
    sent_at = 0.0

    def send(started: subprocess.Popen[bytes], folder: Path) -> None:
        """Send the signal after a step."""
        nonlocal sent_at
        if runs.wait_for_step(started, folder, _AFTER):
            sent_at = time.time()
            if to_the_group:
                # The run leads a process group of its own, as a terminal's foreground job does.
                os.killpg(started.pid, number)
            else:
                started.send_signal(number)

    slow = Inject(rank=runs.rank, step=0, fault="slow", seconds=_A_STEP)
    first = runs.train(name, meanwhile=send, inject=(slow,))
    if not sent_at or first.code != 128 + number:
        return FaultOutcome(survived=False, happened=f"exit code {first.code}: {first.last_words}", left=first)
    done = len(first.losses)
    stepped_at = 0.0

    def look(started: subprocess.Popen[bytes], folder: Path) -> None:
        """Record when the next run takes its first step."""
        nonlocal stepped_at
        if runs.wait_for_step(started, folder, done, since=sent_at):
            stepped_at = time.time()

    second = runs.train(name, meanwhile=look, resume="auto")
    goes_on_at = second.report.get("first_step")
    return FaultOutcome(
        survived=second.code == 0 and bool(goes_on_at),
        happened=f"saved after step {done - 1}, exit code {first.code}, started again",
        left=second,
        seconds=stepped_at - sent_at if stepped_at else None,
        steps_lost=done - goes_on_at if goes_on_at is not None else None,
    )


def restarted(runs: Runs, fault: Fault, **run: Any) -> FaultOutcome:
    """Commit a fault in a job with one restart."""
    planted = Inject(rank=runs.rank, step=runs.step, fault=fault)
    left = runs.train(fault, inject=(planted,), max_restarts=1, **run)
    if len(left.faults) != 1:
        return FaultOutcome(survived=False, happened=left.last_words, left=left)
    (only_fault,) = left.faults
    right = (
        only_fault["rank"] == runs.rank and only_fault["step"] == runs.step and only_fault["goes_on_at"] is not None
    )
    return FaultOutcome(
        survived=left.code == 0 and right,
        happened=f"rank {only_fault['rank']} in step {only_fault['step']}: {only_fault['cause']}",
        left=left,
        seconds=only_fault["seconds"],
        steps_lost=only_fault["steps_lost"],
    )


_LIMIT = 5.0  # seconds; the job's own limit may be minutes, too long for a drill


def _hang(runs: Runs) -> FaultOutcome:
    """Hang a rank: the watchdog must detect it within its limit and restart the ranks."""
    limit = runs.job.run.hang_limit
    return restarted(runs, "hang", hang_limit=_LIMIT if limit is None else min(limit, _LIMIT))


HANG = Drill(name="hang", does="a rank stops and does not come to a collective", run=_hang)


INTERRUPTED = Drill(
    name="ctrl-c",
    does="Ctrl-C, and the job is started again",
    run=lambda runs: requeued(runs, "ctrl-c", signal.SIGINT, to_the_group=True),
)


KILL = Drill(name="kill", does="a rank is killed by SIGKILL", run=lambda runs: restarted(runs, "kill"))


def _nan(runs: Runs) -> FaultOutcome:
    """Make a loss NaN: the training must roll back and leave out exactly that batch."""
    planted = Inject(rank=runs.rank, step=runs.step, fault="nan")
    left = runs.train("nan", inject=(planted,), on_nonfinite="rollback")
    steps = sorted(left_out(left.folder))
    return FaultOutcome(
        survived=left.code == 0 and steps == [runs.step],
        happened=f"rolled back, without the batch of step {', '.join(map(str, steps))}" if steps else left.last_words,
        left=left,
    )


NAN = Drill(name="nan", does="a step's loss is NaN", run=_nan, changes_result=True)


OUT_OF_MEMORY = Drill(name="oom", does="a rank runs out of memory", run=lambda runs: restarted(runs, "oom"))


RAISED = Drill(name="raise", does="a rank raises an exception", run=lambda runs: restarted(runs, "raise"))


_TIMES = 3  # a slow rank's step / the undisturbed run's
_LEAST = 0.1  # seconds


def _slow(runs: Runs) -> FaultOutcome:
    """Slow a rank down: the report must name it."""
    seconds = max(_LEAST, (_TIMES - 1) * runs.step_seconds)
    left = runs.train("slow", inject=(Inject(rank=runs.rank, step=1, fault="slow", seconds=seconds),))
    named = left.report.get("slow_ranks", [])
    return FaultOutcome(
        survived=left.code == 0 and named == [runs.rank],
        happened=f"named as slow: {', '.join(f'rank {rank}' for rank in named) or 'none'}",
        left=left,
        steps_lost=0,
    )


SLOW = Drill(name="slow", does="a rank takes longer than the others", run=_slow, processes=2)


_ENDED_WITHIN = 5.0  # seconds in which the ranks must end without their supervisor


def _supervisor(runs: Runs) -> FaultOutcome:
    """Kill the supervisor alone: the ranks must end by themselves, and the job is started again."""
    killed_at, left_over = 0.0, 0

    def kill(started: subprocess.Popen[bytes], folder: Path) -> None:
        """Kill the supervisor after a step, and wait until its ranks have ended."""
        nonlocal killed_at, left_over
        if runs.wait_for_step(started, folder, _AFTER):
            processes = Processes(started, folder, runs.rank + 1).tree()
            killed_at = time.time()
            started.kill()
            left_over = still_there([pid for pid in processes if pid != started.pid], within=_ENDED_WITHIN)

    slow = Inject(rank=runs.rank, step=0, fault="slow", seconds=_A_STEP)
    first = runs.train("supervisor", meanwhile=kill, inject=(slow,))
    if not killed_at:
        return FaultOutcome(survived=False, happened=f"exit code {first.code}: {first.last_words}", left=first)
    if left_over:
        return FaultOutcome(survived=False, happened=f"{left_over} processes did not end", left=first)
    done = len(first.losses)
    second = runs.train("supervisor", resume="auto")
    goes_on_at = second.report.get("first_step")
    return FaultOutcome(
        survived=second.code == 0 and goes_on_at is not None,
        happened="the ranks ended by themselves; started again",
        left=second,
        steps_lost=done - goes_on_at if goes_on_at is not None else None,
    )


SUPERVISOR = Drill(
    name="supervisor",
    does="the process that supervises the ranks is killed, alone, and the job is started again",
    run=_supervisor,
    processes=2,  # one process alone supervises itself
)


TERMINATED = Drill(
    name="sigterm",
    does="the job gets SIGTERM, and is started again",
    run=lambda runs: requeued(runs, "sigterm", signal.SIGTERM, to_the_group=False),
)


DRILLS = (KILL, RAISED, HANG, OUT_OF_MEMORY, TERMINATED, INTERRUPTED, NAN, SLOW, SUPERVISOR)
