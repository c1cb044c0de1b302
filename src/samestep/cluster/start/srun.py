"""Start by srun, inside a Slurm allocation: one step with one task on each of the job's nodes."""

from collections.abc import Sequence

from samestep.cluster.start.part import Part
from samestep.cluster.start.remote import far_end
from samestep.cluster.start.starter import Bring, Starter, Ways


def _bring(parts: Sequence[Part], ways: Ways) -> list[Bring]:
    # srun gives every task what comes on its standard input.
    step = (
        *("srun", f"--nodes={len(parts)}", f"--ntasks={len(parts)}", "--ntasks-per-node=1"),
        # All that the allocation has on a node is for the agent's ranks, which share it out by themselves.
        *(f"--nodelist={','.join(part.host for part in parts)}", "--cpu-bind=none"),
        # A node that dies ends the step of all, unless the job can go on without it.
        *(["--no-kill", "--kill-on-bad-exit=0"] if parts[0].elastic else ["--kill-on-bad-exit=0"]),
    )
    return [Bring(command=(*step, *far_end(ways.remote_python)), parts=tuple(parts))]


STARTER = Starter(bring=_bring)
