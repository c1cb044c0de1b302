"""A Slurm job: the nodes that were given to it, seen from sbatch, salloc, or a step that srun started."""

from samestep.cluster.cluster import Cluster, Host
from samestep.cluster.discover.place import Found, Given, Slots, Variables
from samestep.cluster.discover.slurm_lists import host_names
from samestep.cluster.discover.who_am_i import which
from samestep.errors import UserError
from samestep.ranks import counts, in_slurm_step
from samestep.visible import DeviceChoice


class Slurm:
    """The nodes of the job, or of the step where srun started this process."""

    name = "slurm"
    sign = "SLURM_JOB_ID"
    everywhere = False

    def named(self, given: Given) -> bool:
        return False

    def there(self, given: Given) -> bool:
        return "SLURM_JOB_ID" in given.environ and "SLURM_JOB_NODELIST" in given.environ

    def find(self, given: Given) -> Found:
        read = Variables(given.environ)
        job = read.wanted("SLURM_JOB_ID", "the job's number")
        step = in_slurm_step(given.environ)
        name = "SLURM_STEP_NODELIST" if step and read.text("SLURM_STEP_NODELIST") else "SLURM_JOB_NODELIST"
        names = host_names(name, read.wanted(name, "the names of the job's hosts"))
        # One task on each node: this command is that task, and starts the node's ranks.
        agents = step and read.number("SLURM_STEP_NUM_TASKS") == len(names)
        slots, counted = _slots(read, names, agents=agents, device=given.device)
        node = read.number("SLURM_NODEID")
        if node is not None and node >= len(names):
            raise UserError(f"SLURM_NODEID is {node}, and {name} names {len(names)}; Slurm sets both")
        return Found(
            cluster=Cluster(
                place=self.name,
                hosts=tuple(Host(name=host, slots=count) for host, count in zip(names, slots, strict=True)),
                this=which(names, given.host.name) if node is None else node,
                job=job,
            ),
            read=read.read(),
            slots_from=counted,
            on_every_host=agents and len(names) > 1,
        )


def _slots(read: Variables, names: list[str], *, agents: bool, device: DeviceChoice) -> tuple[list[int], Slots]:
    """The slots of each node: its accelerators, else the tasks that were asked for, else its cores.

    Where tasks are agents, which start ranks, their cores are what counts.

    Slurm says the accelerators of this node alone; the others are taken to have as many.
    """
    gpus = read.number("SLURM_GPUS_ON_NODE") or _per_node(read, "SLURM_GPUS_PER_NODE")
    if gpus and device != "cpu":
        return [gpus] * len(names), "accelerators"
    asked = read.first("SLURM_NTASKS_PER_NODE", "SLURM_NTASKS")
    if not agents and asked is not None:
        name = "SLURM_STEP_TASKS_PER_NODE" if read.text("SLURM_STEP_TASKS_PER_NODE") else "SLURM_TASKS_PER_NODE"
        return _for_each(read, name, len(names)), "listed"
    of_a_task = read.number("SLURM_CPUS_PER_TASK", 1)
    if agents and of_a_task is not None:
        return [of_a_task] * len(names), "cores"
    # Of all of the job's nodes, of which a step may have fewer.
    job = host_names("SLURM_JOB_NODELIST", read.wanted("SLURM_JOB_NODELIST", "the names of the job's hosts"))
    cores = dict(zip(job, _for_each(read, "SLURM_JOB_CPUS_PER_NODE", len(job)), strict=True))
    if stray := [name for name in names if name not in cores]:
        raise UserError(f"SLURM_STEP_NODELIST names {stray[0]}, which is not in SLURM_JOB_NODELIST; Slurm sets both")
    return [max(1, cores[name] // (of_a_task or 1)) for name in names], "cores"


def _for_each(read: Variables, name: str, nodes: int) -> list[int]:
    text = read.wanted(name, "a number for each node, such as 2(x3),1,")
    found = counts(name, text)
    if len(found) != nodes or 0 in found:
        raise UserError(f"{name} is {text!r}, which doesn't say a number for each of {nodes} nodes")
    return found


def _per_node(read: Variables, name: str) -> int | None:
    """A number of accelerators, which a kind may stand before: 4, a100:4, or several kinds with commas between."""
    text = read.text(name)
    if text is None:
        return None
    numbers = [each.rpartition(":")[2] for each in text.split(",")]
    if not all(number.isascii() and number.isdigit() for number in numbers):
        raise UserError(f"{name} is {text!r}; a number of accelerators such as 4 or a100:4 is wanted")
    return sum(map(int, numbers))
