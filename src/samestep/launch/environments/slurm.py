"""A Slurm job: the nodes that were given to it, seen from sbatch, salloc, or a step that srun started.

Agents are started by srun, inside the allocation: one step with one task on each of the job's nodes.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import prod

from samestep import environment
from samestep.errors import UserError
from samestep.host_names import check_count, check_host, check_once, quoted, shown
from samestep.launch.environments.base import (
    Cluster,
    FoundCluster,
    Host,
    PlaceInputs,
    RendezvousInfo,
    Slots,
    which,
)
from samestep.launch.node_spec import NodeSpec
from samestep.launch.options import LaunchOptions
from samestep.launch.starter import AgentCommand, Starter, agent_command
from samestep.launchers import (
    SLURM_COUNTS,
    SlurmStep,
    read_slurm_step,
    slurm_accelerators,
    slurm_cores_of_task,
    slurm_counts,
)
from samestep.ranks import DeviceChoice
from samestep.variables import Variables

_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?", re.ASCII)
_PLAIN = re.compile(r"[\w.-]*", re.ASCII)
_LONGEST = 1 << 20  # characters of a list


def host_names(variable: str, text: str) -> list[str]:
    """Expand a Slurm node list, in order. Raises UserError with the variable and what is wrong in it.

    How many hosts it names is counted before they are listed: a[0-99999]b[0-99999] names ten thousand million.
    """
    if len(text) > _LONGEST:
        raise UserError(f"{variable} has {len(text):,} characters, and a list of hosts has {_LONGEST:,} at most")
    names: list[str] = []
    for part in _parts(text):
        pieces = re.split(r"\[([^\[\]]*)\]", part)  # plain, ranges, plain, ranges, plain
        plain, ranges = pieces[::2], pieces[1::2]
        if not part or any(_PLAIN.fullmatch(piece) is None for piece in plain):
            raise _wrong(variable, text, part)
        choices = [[_range(variable, text, piece_) for piece_ in piece.split(",")] for piece in ranges]
        check_count(len(names) + prod(sum(len(numbers) for numbers, _ in choice) for choice in choices), variable)
        for numbers in product(*map(_padded, choices)):
            name = "".join(word for pair in zip(plain, [*numbers, ""], strict=True) for word in pair)
            names.append(check_host(name, variable))
    check_once(names, variable)
    return names


def _parts(text: str) -> Iterator[str]:
    """Split a list at its commas outside brackets."""
    begin = depth = 0
    for end, character in enumerate(text):
        if character == "," and not depth:
            yield text[begin:end]
            begin = end + 1
        depth += (character == "[") - (character == "]")
    yield text[begin:]


def _range(variable: str, text: str, written: str) -> tuple[range, int]:
    """The numbers of a range, and how many digits they have with leading zeros."""
    match = _RANGE.fullmatch(written)
    if match is None:
        raise _wrong(variable, text, written)
    numbers = range(int(match[1]), int(match[2] or match[1]) + 1)
    if not numbers:
        raise _wrong(variable, text, written)
    return numbers, len(match[1])


def _padded(choice: Sequence[tuple[range, int]]) -> Iterator[str]:
    return (str(number).zfill(digits) for numbers, digits in choice for number in numbers)


def _wrong(variable: str, text: str, part: str) -> UserError:
    return UserError(
        f"{variable} is {shown(text)}; {quoted(part)} is no part of a list of hosts such as gpu[01-03,7],host-b"
    )


class Slurm:
    """The nodes of the job, or of the step where srun started this process."""

    name = "slurm"
    sign = "SLURM_JOB_ID"
    everywhere = False
    allocates = True

    def named(self, inputs: PlaceInputs) -> bool:
        return False

    def there(self, inputs: PlaceInputs) -> bool:
        return "SLURM_JOB_ID" in inputs.environ and "SLURM_JOB_NODELIST" in inputs.environ

    def find(self, inputs: PlaceInputs) -> FoundCluster:
        """The nodes of a Slurm job, seen from sbatch or salloc, or from a task that srun started.

        In a step with one task a node, each task is that node's agent; else the job's node starts the others by srun.
        """
        read = Variables(inputs.environ)
        job = read.wanted("SLURM_JOB_ID", "the job's number")
        step = read_slurm_step(inputs.environ)
        name, names = _nodes(read, step)
        # With one task on each node, this task is the node's agent.
        agents = step is not None and step.tasks == len(names)
        slots, counted = _slots(read, (name, names), step, agents=agents, device=inputs.device)
        node = read.number("SLURM_NODEID") if step is None else step.node
        if node is not None and node >= len(names):
            raise UserError(f"SLURM_NODEID is {node}, and {name} names {len(names)}; Slurm sets both")
        return FoundCluster(
            cluster=Cluster(
                place=self.name,
                hosts=tuple(Host(name=host, slots=count) for host, count in zip(names, slots, strict=True)),
                this=which(names, inputs.host.name) if node is None else node,
                job=job,
            ),
            read=tuple(dict.fromkeys([*(step.read if step is not None else ()), *read.read()])),
            slots_from=counted,
            on_every_host=agents and len(names) > 1,
        )


def _nodes(read: Variables, step: SlurmStep | None) -> tuple[str, list[str]]:
    """Return the variable that lists the nodes of the step, else of the job, and the nodes' names."""
    name = "SLURM_STEP_NODELIST" if step is not None and read.text("SLURM_STEP_NODELIST") else "SLURM_JOB_NODELIST"
    return name, host_names(name, read.wanted(name, "the names of the job's hosts"))


def rendezvous_info(environ: Mapping[str, str]) -> RendezvousInfo:
    """Return where the tasks of a step meet: on its first node."""
    read = Variables(environ)
    _, nodes = _nodes(read, read_slurm_step(environ))
    parts = ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    return RendezvousInfo(
        job=" ".join(["slurm", *(read.text(part) or "" for part in parts)]),
        addresses=(nodes[0],),
        other=nodes[1] if len(nodes) > 1 else None,
    )


def _slots(
    read: Variables, listed: tuple[str, list[str]], step: SlurmStep | None, *, agents: bool, device: DeviceChoice
) -> tuple[list[int], Slots]:
    """Return the slots of each node: its accelerators, else the requested tasks, else its cores.

    If tasks are agents, which start ranks, their cores count. Otherwise the tasks of a step are the ranks.
    """
    variable, names = listed
    if step is not None and not agents:
        tasks = list(step.tasks_per_node)
        if len(tasks) != len(names):
            raise UserError(
                f"{variable} names {len(names)} nodes, and the step has tasks on {len(tasks)}; Slurm sets both"
            )
        return tasks, "listed"
    gpus = _gpus(read, len(names), step=step is not None) if device != "cpu" else None
    if gpus is not None:
        return gpus, "accelerators"
    set_tasks = read.first("SLURM_NTASKS_PER_NODE", "SLURM_NTASKS")
    if not agents and set_tasks is not None:
        return _for_each(read, "SLURM_TASKS_PER_NODE", len(names)), "listed"
    cores_of_a_task = slurm_cores_of_task(read)
    if agents and cores_of_a_task is not None:
        return [cores_of_a_task] * len(names), "cores"
    # The variable covers all nodes of the job; a step may have fewer.
    job = host_names("SLURM_JOB_NODELIST", read.wanted("SLURM_JOB_NODELIST", "the names of the job's hosts"))
    cores = dict(zip(job, _for_each(read, "SLURM_JOB_CPUS_PER_NODE", len(job)), strict=True))
    if stray := [name for name in names if name not in cores]:
        raise UserError(f"SLURM_STEP_NODELIST names {stray[0]}, which is not in SLURM_JOB_NODELIST; Slurm sets both")
    return [max(1, cores[name] // (cores_of_a_task or 1)) for name in names], "cores"


def _gpus(read: Variables, nodes: int, *, step: bool) -> list[int] | None:
    """Return the accelerators of each node; None if there are none.

    Slurm counts those of this node only; others are assumed to have as many, unless the job requested a number for
    each task. The job's request does not apply to a step, although its tasks inherit the variables.
    """
    of_a_node = None if step else _accelerators(read, "SLURM_GPUS_PER_NODE")
    of_a_task = None if step else _accelerators(read, "SLURM_GPUS_PER_TASK")
    if of_a_task and not of_a_node and read.text("SLURM_TASKS_PER_NODE") is not None:
        return [of_a_task * count for count in _for_each(read, "SLURM_TASKS_PER_NODE", nodes)]
    gpus = of_a_node or slurm_accelerators(read) or _accelerators(read, "SLURM_GPUS_PER_NODE")
    return [gpus] * nodes if gpus else None


def _for_each(read: Variables, name: str, nodes: int) -> list[int]:
    """Expand Slurm's number for each node, such as 2(x3),1."""
    text = read.wanted(name, SLURM_COUNTS)
    counts = slurm_counts(name, text)
    if len(counts) != nodes or 0 in counts:
        raise UserError(f"{name} is {text!r}, which doesn't say a number for each of {nodes} nodes")
    return counts


def _accelerators(read: Variables, name: str) -> int | None:
    """Parse Slurm's number of accelerators: 4, with a type a100:4, or of several types a100:2,v100:2."""
    text = read.text(name)
    if text is None:
        return None
    numbers = [word.rpartition(":")[2] for word in text.split(",")]
    if not all(number.isascii() and number.isdigit() for number in numbers):
        raise UserError(f"{name} is {text!r}; a number of accelerators such as 4 or a100:4 is wanted")
    return sum(map(int, numbers))


# Requests for each task of the job. srun would read them as its own options, but its one task a node needs all.
_OF_A_TASK = ("SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_NTASKS_PER_GPU", "SLURM_GPU_BIND")


def _agent_commands(specs: Sequence[NodeSpec], options: LaunchOptions) -> list[AgentCommand]:
    """Build one srun for all nodes: a task on each, with all the allocation's cores and GPUs there."""
    # srun copies its standard input to every task.
    step = (
        *("srun", f"--nodes={len(specs)}", f"--ntasks={len(specs)}", "--ntasks-per-node=1"),
        # No binding: the agent divides all of the node's allocation among its ranks.
        *(f"--nodelist={','.join(spec.host for spec in specs)}", "--cpu-bind=none"),
        # By default a lost node ends the whole step; an elastic job goes on without it.
        *_gpus_of_step(specs),
        *(["--no-kill", "--kill-on-bad-exit=0"] if specs[0].elastic else ["--kill-on-bad-exit=0"]),
    )
    # srun passes its whole environment to the tasks.
    without = (*_OF_A_TASK, *options.kept_back)
    return [AgentCommand(command=(*step, *agent_command(options.remote_python)), specs=tuple(specs), without=without)]


def _gpus_of_step(specs: Sequence[NodeSpec]) -> list[str]:
    """Options that give the step all accelerators of its nodes, if the job requested a number for each task.

    Otherwise Slurm would give each agent only one task's share; srun takes no different numbers for different nodes.
    """
    environ = environment.snapshot()
    found_cluster = Slurm().find(PlaceInputs(environ=environ))
    if (
        "SLURM_GPUS_PER_TASK" not in environ
        or found_cluster.slots_from != "accelerators"
        or specs[0].ranks.device == "cpu"
    ):
        return []
    there = {host.name: host.slots for host in found_cluster.cluster.hosts}
    return [f"--gpus={sum(there[spec.host] for spec in specs)}"]


STARTER = Starter(agent_commands=_agent_commands, kept_back="not given to the ranks")
