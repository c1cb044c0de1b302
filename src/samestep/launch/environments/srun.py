"""Start by srun, inside a Slurm allocation: one step with one task on each of the job's nodes."""

from collections.abc import Sequence

from samestep import environment
from samestep.launch.environments.base import PlaceInputs
from samestep.launch.environments.slurm import Slurm
from samestep.launch.node_spec import AgentCommand, LaunchOptions, NodeSpec, Starter
from samestep.launch.remote_agent import agent_command

# What a task of the job is to have. srun would read it as its own options; the agent is one task for all of a node.
_OF_A_TASK = ("SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_NTASKS_PER_GPU", "SLURM_GPU_BIND")


def _bring(parts: Sequence[NodeSpec], options: LaunchOptions) -> list[AgentCommand]:
    # srun gives every task what comes on its standard input.
    step = (
        *("srun", f"--nodes={len(parts)}", f"--ntasks={len(parts)}", "--ntasks-per-node=1"),
        # All that the allocation has on a node is for the agent's ranks, which share it out by themselves.
        *(f"--nodelist={','.join(part.host for part in parts)}", "--cpu-bind=none"),
        # A node that dies ends the step of all, unless the job can go on without it.
        *_gpus(parts),
        *(["--no-kill", "--kill-on-bad-exit=0"] if parts[0].elastic else ["--kill-on-bad-exit=0"]),
    )
    # It gives its tasks all variables that it has itself.
    without = (*_OF_A_TASK, *options.kept_back)
    return [AgentCommand(command=(*step, *agent_command(options.remote_python)), parts=tuple(parts), without=without)]


def _gpus(parts: Sequence[NodeSpec]) -> list[str]:
    """What gives the step all accelerators of its nodes, where the job asked for so many a task.

    Slurm would give each agent a task's share otherwise, and takes no other number for each of several nodes.
    """
    environ = environment.snapshot()
    found = Slurm().find(PlaceInputs(environ=environ))
    if "SLURM_GPUS_PER_TASK" not in environ or found.slots_from != "accelerators" or parts[0].device == "cpu":
        return []
    there = {host.name: host.slots for host in found.cluster.hosts}
    return [f"--gpus={sum(there[part.host] for part in parts)}"]


STARTER = Starter(bring=_bring, kept_back="not given to the ranks")
