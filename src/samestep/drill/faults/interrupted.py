"""Ctrl-C, which a terminal sends to all processes of the job, and a second start by hand."""

import signal

from samestep.drill.drill import Drill
from samestep.drill.requeued import requeued

INTERRUPTED = Drill(
    name="ctrl-c",
    does="Ctrl-C, and the job is started again",
    run=lambda runs: requeued(runs, "ctrl-c", signal.SIGINT, to_the_group=True),
)
