"""The scheduler wants the machine back: SIGTERM with notice, and the job is queued again."""

import signal

from samestep.drill.drill import Drill
from samestep.drill.requeued import requeued

TERMINATED = Drill(
    name="sigterm",
    does="the job gets SIGTERM, and is started again",
    run=lambda runs: requeued(runs, "sigterm", signal.SIGTERM, to_the_group=False),
)
