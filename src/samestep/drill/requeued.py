"""Signals after which a job saves and ends, and a scheduler starts the same command once more."""

import os
import signal
import subprocess
import time
from pathlib import Path

from samestep.drill.drill import Outcome
from samestep.drill.runs import Runs
from samestep.job import Inject

_A_STEP = 0.25  # seconds that steps are slowed down by, so that the signal comes before the last one
_AFTER = 2  # the step after which it is sent


def requeued(runs: Runs, name: str, number: signal.Signals, *, to_the_group: bool) -> Outcome:
    """Send a signal in the middle of a training, and start it again where it has ended as it should."""
    sent_at = 0.0

    def send(started: subprocess.Popen[bytes], folder: Path) -> None:
        nonlocal sent_at
        if runs.wait_for_step(started, folder, _AFTER):
            sent_at = time.time()
            if to_the_group:
                # The leader of a session of its own, as a terminal's foreground job is.
                os.killpg(started.pid, number)
            else:
                started.send_signal(number)

    slow = Inject(rank=runs.rank, step=0, fault="slow", seconds=_A_STEP)
    first = runs.train(name, meanwhile=send, inject=(slow,))
    if not sent_at or first.code != 128 + number:
        return Outcome(survived=False, happened=f"exit code {first.code}: {first.last_words}", left=first)
    done = len(first.losses)
    stepped_at = 0.0

    def look(started: subprocess.Popen[bytes], folder: Path) -> None:
        nonlocal stepped_at
        if runs.wait_for_step(started, folder, done, since=sent_at):
            stepped_at = time.time()

    second = runs.train(name, meanwhile=look, resume="auto")
    goes_on_at = second.report.get("first_step")
    return Outcome(
        survived=second.code == 0 and bool(goes_on_at),
        happened=f"saved after step {done - 1}, exit code {first.code}, started again",
        left=second,
        seconds=stepped_at - sent_at if stepped_at else None,
        steps_lost=done - goes_on_at if goes_on_at is not None else None,
    )
