"""A rank's code raises."""

from samestep.drill.drill import Drill
from samestep.drill.restarted import restarted

RAISED = Drill(name="raise", does="a rank raises an exception", run=lambda runs: restarted(runs, "raise"))
