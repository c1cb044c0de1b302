"""The faults that are drilled, one a file; this is their table."""

from samestep.drill.faults.hang import HANG
from samestep.drill.faults.interrupted import INTERRUPTED
from samestep.drill.faults.kill import KILL
from samestep.drill.faults.nan import NAN
from samestep.drill.faults.out_of_memory import OUT_OF_MEMORY
from samestep.drill.faults.raised import RAISED
from samestep.drill.faults.slow import SLOW
from samestep.drill.faults.terminated import TERMINATED

DRILLS = (KILL, RAISED, HANG, OUT_OF_MEMORY, TERMINATED, INTERRUPTED, NAN, SLOW)
