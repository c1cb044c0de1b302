"""A rank asks for more memory than there is, under a limit of its own: the machine keeps its memory."""

from samestep.drill.drill import Drill
from samestep.drill.restarted import restarted

OUT_OF_MEMORY = Drill(name="oom", does="a rank runs out of memory", run=lambda runs: restarted(runs, "oom"))
