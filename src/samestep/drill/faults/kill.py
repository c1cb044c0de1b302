"""A rank is killed, as the system does when memory runs out."""

from samestep.drill.drill import Drill
from samestep.drill.restarted import restarted

KILL = Drill(name="kill", does="a rank is killed by SIGKILL", run=lambda runs: restarted(runs, "kill"))
