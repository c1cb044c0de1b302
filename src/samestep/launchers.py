"""Reads the environment variables of each launcher (torchrun, mpirun, srun, ...), in one function each.

Such a function makes a frozen object of the variables, or returns None in a process of another launcher; it raises
UserError for values that don't fit together. `ranks` takes from these objects which rank this
process is, `launch.environments` on which hosts the job runs.
"""

import re
from dataclasses import dataclass
from typing import Any

from samestep.errors import UserError
from samestep.host_names import check_count, check_host, checked_hosts, shown
from samestep.limits import MOST_PORT, MOST_RANKS, MOST_RANKS_A_HOST, read_whole
from samestep.variables import Environ, Read, Variables


def _check_fit(launcher: str, *pairs: tuple[str, int, str, int]) -> None:
    """Raise UserError for a number, counted from 0, not below its size: (name, number, name of the size, size)."""
    for name, number, name_of_size, size in pairs:
        if number >= size:
            raise UserError(
                f"{name} is {number} and {name_of_size} {size}, counted from 0; they don't fit, so {launcher} has "
                "not set both"
            )


@dataclass(frozen=True, kw_only=True)
class TorchrunVariables:
    """torchrun's variables, which DeepSpeed's launcher and many others set as well."""

    rank: int
    world_size: int
    local_rank: int | None
    local_world_size: int | None
    node: int | None  # index of this host
    nodes: int | None
    main_address: str | None  # of rank 0's host
    main_port: int | None
    job: str | None
    read: tuple[Read, ...]


def _address(read: Variables, name: str) -> str | None:
    """Return the address of a host; None if the variable is unset."""
    address = read.text(name)
    return None if address is None else check_host(address, name)


def in_torchrun(environ: Environ) -> bool:
    """Whether torchrun's variables are set, and not by a PyTorchJob's operator."""
    return "RANK" in environ and "WORLD_SIZE" in environ and not in_pytorchjob(environ)


def read_torchrun(environ: Environ) -> TorchrunVariables | None:
    """Read torchrun's variables; None in another launcher's process, such as a pod of a PyTorchJob."""
    if not in_torchrun(environ):
        return None
    read = Variables(environ)
    rank, world_size = read.needed("RANK"), read.needed("WORLD_SIZE", 1, MOST_RANKS)
    # DeepSpeed's launcher has another name for it.
    name = "LOCAL_WORLD_SIZE" if environ.get("LOCAL_WORLD_SIZE") else "LOCAL_SIZE"
    local_size, local_rank = read.number(name, 1), read.number("LOCAL_RANK")
    nodes, node = read.number("GROUP_WORLD_SIZE", 1), read.number("GROUP_RANK")
    _check_fit("torchrun", ("RANK", rank, "WORLD_SIZE", world_size))
    if local_size is not None:
        nodes = -(-world_size // local_size) if nodes is None else nodes
        node = rank // local_size if node is None else node
        if local_size > world_size:
            raise UserError(f"{name} is {local_size}, of a WORLD_SIZE of {world_size}; use no more than all ranks")
    if local_rank is not None:
        size_name, size = ("WORLD_SIZE", world_size) if local_size is None else (name, local_size)
        _check_fit("torchrun", ("LOCAL_RANK", local_rank, size_name, size))
    if node is not None and nodes is not None:
        _check_fit("torchrun", ("GROUP_RANK", node, "GROUP_WORLD_SIZE", nodes))
    return TorchrunVariables(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_size,
        node=node,
        nodes=nodes,
        main_address=_address(read, "MASTER_ADDR"),
        main_port=read.number("MASTER_PORT", 1, MOST_PORT),
        job=read.text("TORCHELASTIC_RUN_ID"),
        read=read.read(),
    )


@dataclass(frozen=True, kw_only=True)
class HorovodRunVariables:
    """The variables of `horovodrun` with gloo: this rank, and the server where the ranks meet."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    host: str  # this rank's, as the command names it
    address: str  # of the server
    port: int


def read_horovodrun(environ: Environ) -> HorovodRunVariables | None:
    """Read the variables of `horovodrun`; None if it didn't start this process, or a launcher inside of it did."""
    needed = ("HOROVOD_RANK", "HOROVOD_GLOO_RENDEZVOUS_ADDR")
    if "RANK" in environ or any(name not in environ for name in needed):
        return None
    read = Variables(environ)
    rank, world_size = read.needed("HOROVOD_RANK"), read.needed("HOROVOD_SIZE", 1, MOST_RANKS)
    local_rank, local_size = read.needed("HOROVOD_LOCAL_RANK"), read.needed("HOROVOD_LOCAL_SIZE", 1)
    _check_fit(
        "horovodrun",
        ("HOROVOD_RANK", rank, "HOROVOD_SIZE", world_size),
        ("HOROVOD_LOCAL_RANK", local_rank, "HOROVOD_LOCAL_SIZE", local_size),
    )
    return HorovodRunVariables(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_size,
        host=read.text("HOROVOD_HOSTNAME") or "localhost",
        address=check_host(
            read.wanted("HOROVOD_GLOO_RENDEZVOUS_ADDR", "the address of horovodrun's server"),
            "HOROVOD_GLOO_RENDEZVOUS_ADDR",
        ),
        port=read.needed("HOROVOD_GLOO_RENDEZVOUS_PORT", 1, MOST_PORT),
    )


@dataclass(frozen=True, kw_only=True)
class MpiVariables:
    """What an mpirun tells a process. A process that is alone may start ranks itself."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    nodes: int | None = None
    job: str | None = None
    addresses: tuple[str, ...] = ()  # of mpirun's host, as mpirun lists them
    contact: str = ""  # mpirun's own, in which they are
    read: tuple[Read, ...] = ()


def in_open_mpi(environ: Environ) -> bool:
    """Whether Open MPI's mpirun started this process."""
    return "OMPI_COMM_WORLD_SIZE" in environ and "OMPI_COMM_WORLD_RANK" in environ


def read_open_mpi(environ: Environ) -> MpiVariables | None:
    """Read the variables of Open MPI's mpirun; None in another launcher's process."""
    if not in_open_mpi(environ):
        return None
    read = Variables(environ)
    world_size, rank = read.needed("OMPI_COMM_WORLD_SIZE", 1, MOST_RANKS), read.needed("OMPI_COMM_WORLD_RANK")
    local_size, local_rank = read.needed("OMPI_COMM_WORLD_LOCAL_SIZE", 1), read.needed("OMPI_COMM_WORLD_LOCAL_RANK")
    _check_fit(
        "mpirun",
        ("OMPI_COMM_WORLD_RANK", rank, "OMPI_COMM_WORLD_SIZE", world_size),
        ("OMPI_COMM_WORLD_LOCAL_RANK", local_rank, "OMPI_COMM_WORLD_LOCAL_SIZE", local_size),
    )
    if local_size > world_size:
        raise UserError(
            f"OMPI_COMM_WORLD_LOCAL_SIZE is {local_size} and OMPI_COMM_WORLD_SIZE {world_size}; they don't fit, so "
            "mpirun has not set both"
        )
    contact = read.text("OMPI_MCA_orte_hnp_uri") or ""
    return MpiVariables(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_size,
        nodes=read.number("OMPI_MCA_orte_num_nodes", 1),  # Open MPI 4 alone sets it
        job=read.first("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
        addresses=_addresses(contact),
        contact=contact,
        read=read.read(),
    )


def _addresses(contact: str) -> tuple[str, ...]:
    """Parse the addresses in mpirun's contact: 1834352640.0;tcp://10.0.0.5,10.1.0.5:37865;tcp6://[fd00::5]:56449."""
    address_lists = re.findall(r"tcp6?://([^;]+):\d+", contact)
    listed = (address.strip("[]") for addresses in address_lists for address in addresses.split(","))
    return tuple(checked_hosts(listed, "OMPI_MCA_orte_hnp_uri"))


def read_pmi(environ: Environ) -> MpiVariables | None:
    """Read the variables of MPICH's and Intel's mpirun. PMI's without the local ones may come from elsewhere."""
    names = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    if any(name not in environ for name in names):
        return None
    read = Variables(environ)
    rank, world_size, local_rank, local_size = (read.needed(name) for name in names)
    _check_fit(
        "mpirun",
        ("PMI_RANK", rank, "PMI_SIZE", world_size),
        ("MPI_LOCALRANKID", local_rank, "MPI_LOCALNRANKS", local_size),
    )
    return MpiVariables(rank=rank, world_size=world_size, local_rank=local_rank, local_world_size=local_size)


def mpi_size(environ: Environ) -> int:
    """Return the ranks that MPI knows of, also where its launcher does not say which of a host's this process is."""
    read = Variables(environ)
    return max(read.number(name) or 1 for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"))


@dataclass(frozen=True, kw_only=True)
class SlurmStep:
    """The step of a Slurm job in which srun started this process, and the process's place in it."""

    rank: int  # number of the task in the step
    local_rank: int  # number of the task on its node
    node: int  # index of the node in the step
    tasks_per_node: tuple[int, ...]
    read: tuple[Read, ...]

    @property
    def tasks(self) -> int:
        return sum(self.tasks_per_node)


# Slurm numbers the steps that are not srun's, such as the batch script, from here on.
_NO_STEP = 0xFFFFFFF0


def read_slurm_step(environ: Environ) -> SlurmStep | None:
    """Read the variables of a step's task; None in a batch script or a shell of salloc, which are in no step."""
    read = Variables(environ)
    number = read.number("SLURM_STEP_ID")
    if number is None or number >= _NO_STEP:
        return None
    tasks = read.number("SLURM_STEP_NUM_TASKS", 1) or read.number("SLURM_NTASKS", 1) or 1
    if tasks == 1:
        node = read.number("SLURM_NODEID") or 0
        return SlurmStep(rank=0, local_rank=0, node=node, tasks_per_node=(1,), read=read.read())
    # SLURM_TASKS_PER_NODE may be the job's.
    name = "SLURM_STEP_TASKS_PER_NODE" if read.text("SLURM_STEP_TASKS_PER_NODE") else "SLURM_TASKS_PER_NODE"
    text, node = read.wanted(name, SLURM_COUNTS), read.needed("SLURM_NODEID")
    per_node = slurm_counts(name, text)
    if node >= len(per_node) or sum(per_node) != tasks or 0 in per_node:
        raise UserError(f"{name} is {text!r}, which doesn't say the tasks of node {node} in a step of {tasks} tasks")
    rank, local_rank = read.needed("SLURM_PROCID"), read.needed("SLURM_LOCALID")
    _check_fit(
        "srun",
        ("SLURM_PROCID", rank, "SLURM_STEP_NUM_TASKS", tasks),
        ("SLURM_LOCALID", local_rank, f"the number of node {node} in {name}", per_node[node]),
    )
    return SlurmStep(
        rank=rank,
        local_rank=local_rank,
        node=node,
        tasks_per_node=tuple(per_node),
        read=read.read(),
    )


SLURM_COUNTS = "a number for each node, such as 2(x3),1"
_COUNT = re.compile(r"(\d{1,6})(?:\(x(\d{1,6})\))?", re.ASCII)


def slurm_counts(name: str, text: str) -> list[int]:
    """Expand Slurm's number for each node: 2(x3),1 is 2, 2, 2, 1."""
    counts: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part)
        if match is None:
            raise UserError(f"{name} is {shown(text)}; {SLURM_COUNTS}, is wanted")
        check_count(len(counts) + int(match[2] or 1), name)
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def slurm_cores_of_task(read: Variables) -> int | None:
    """Return the cores of each task, where the job asked for a number of them."""
    return read.number("SLURM_CPUS_PER_TASK", 1)


def slurm_accelerators(read: Variables) -> int | None:
    """Return the accelerators that the job has on this node."""
    return read.number("SLURM_GPUS_ON_NODE")


@dataclass(frozen=True, kw_only=True)
class PyTorchJobPod:
    """What Kubeflow's operator tells a pod of a PyTorchJob.

    RANK numbers the pods, and WORLD_SIZE counts ranks where the job says how many a pod has. An elastic job without
    a master has neither.
    """

    processes: int | str | None  # ranks of a pod; or "auto", "gpu" or "cpu", as torchrun takes them
    pods: int | None  # of a range the most
    main_address: str  # of the first pod
    main_port: int
    rank: int | None
    world_size: int | None
    number: int | None  # of this pod, from 0; None: only its name has it
    numbered_by: str  # the variable of `number`
    job: str
    read: tuple[Read, ...]


def in_pytorchjob(environ: Environ) -> bool:
    """Whether Kubeflow's operator set the variables in this pod, and no launcher has replaced them."""
    pod = "KUBERNETES_SERVICE_HOST" in environ or "PET_NNODES" in environ
    return (
        pod
        and all(name in environ for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"))
        and not any(name in environ for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"))
    )


def is_pod(environ: Environ) -> bool:
    """Whether this process is to start a pod's ranks, or is its one rank: of a plain job, or of an elastic one."""
    elastic = "PET_RDZV_ENDPOINT" in environ and "PET_NNODES" in environ and "LOCAL_RANK" not in environ
    return elastic or in_pytorchjob(environ)


def read_pytorchjob(environ: Environ) -> PyTorchJobPod | None:
    """Read a pod's variables; None elsewhere, and in a rank that a launcher in the pod has started."""
    if not is_pod(environ):
        return None
    read = Variables(environ)
    processes, pods = _processes(read), _pods(read)
    if "MASTER_ADDR" in environ:
        address, port = read.wanted("MASTER_ADDR", "the first pod's name"), read.needed("MASTER_PORT", 1, MOST_PORT)
        check_host(address, "MASTER_ADDR")
        rank, world_size = read.needed("RANK"), read.needed("WORLD_SIZE", 1, MOST_RANKS)
        name = "PET_NODE_RANK" if read.text("PET_NODE_RANK") else "RANK"
        number = read.needed(name)
    else:
        address, port = _endpoint(read.wanted("PET_RDZV_ENDPOINT", "a host and a port"))
        rank = world_size = number = None
        name = "the number in this pod's name"
    return PyTorchJobPod(
        processes=processes,
        pods=pods,
        main_address=address,
        main_port=port,
        rank=rank,
        world_size=world_size,
        number=number,
        numbered_by=name,
        job=read.text("PET_RDZV_ID") or address,
        read=read.read(),
    )


def _processes(read: Variables) -> int | str | None:
    text = read.text("PET_NPROC_PER_NODE")
    if text is None or text in ("auto", "gpu", "cpu"):
        return text
    number = read_whole(text)
    if number is None or not 1 <= number <= MOST_RANKS_A_HOST:
        raise UserError(
            f"PET_NPROC_PER_NODE is {text!r}; a number of 1 or more, auto, gpu or cpu is wanted, and at most "
            f"{MOST_RANKS_A_HOST}"
        )
    return number


def _pods(read: Variables) -> int | None:
    """Parse PET_NNODES; of a range such as 1:4, the maximum."""
    text = read.text("PET_NNODES")
    if text is None:
        return None
    numbers = [read_whole(number) or 0 for number in text.split(":")]
    if len(numbers) > 2 or not all(1 <= number <= MOST_RANKS for number in numbers):
        raise UserError(
            f"PET_NNODES is {text!r}; a number of pods such as 2, or a range such as 1:4, is wanted, and at most "
            f"{MOST_RANKS:,}"
        )
    return numbers[-1]


def _endpoint(text: str) -> tuple[str, int]:
    """Split PET_RDZV_ENDPOINT into host and port."""
    host, _, port = text.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()):
        raise UserError(
            f"PET_RDZV_ENDPOINT is {shown(text)}; a host and a port such as job-worker-0:23456 are wanted"
        )
    return check_host(host, "PET_RDZV_ENDPOINT"), int(port)


@dataclass(frozen=True, kw_only=True)
class SageMakerContainer:
    """What SageMaker's toolkit tells a container of a training job: all of them run the same entry point."""

    hosts: tuple[str, ...]
    current: str  # this container's
    accelerators: int | None
    cores: int | None
    job: str | None
    read: tuple[Read, ...]


_HOSTS = 'a list of hosts such as ["algo-1","algo-2"]'


def on_sagemaker(environ: Environ) -> bool:
    """Whether this process belongs to a SageMaker job."""
    return "SM_RESOURCE_CONFIG" in environ or ("SM_HOSTS" in environ and "SM_CURRENT_HOST" in environ)


def read_sagemaker(environ: Environ) -> SageMakerContainer | None:
    """Read a container's variables; None elsewhere."""
    if not on_sagemaker(environ):
        return None
    read = Variables(environ)
    config = _resource_config(read)
    listed, source = read.json("SM_HOSTS", list, _HOSTS), "SM_HOSTS"
    if listed is None:
        listed, source = config.get("hosts"), '"hosts" in SM_RESOURCE_CONFIG'
    hosts = _hosts(listed, source)
    current = read.text("SM_CURRENT_HOST") or config.get("current_host")
    if current not in hosts:
        names = ", ".join(hosts[:8])
        raise UserError(f"SM_CURRENT_HOST is {shown(current)}, which is none of {names}; SageMaker sets it")
    return SageMakerContainer(
        hosts=hosts,
        current=current,
        accelerators=read.number("SM_NUM_GPUS"),
        cores=read.number("SM_NUM_CPUS", 1),
        job=read.first("SAGEMAKER_JOB_NAME", "TRAINING_JOB_NAME"),
        read=read.read(),
    )


def sagemaker_interface(environ: Environ) -> str | None:
    """Return the network interface that SageMaker names for messages between containers; None elsewhere."""
    read = Variables(environ)
    named = read.text("SM_NETWORK_INTERFACE_NAME") or _resource_config(read).get("network_interface_name")
    return str(named) if named else None


def _resource_config(read: Variables) -> dict[str, Any]:
    return read.json("SM_RESOURCE_CONFIG", dict, 'a mapping with "hosts" and "current_host"') or {}


def _hosts(listed: Any, source: str) -> tuple[str, ...]:
    """Return the containers' names, validated, in a fixed order."""
    if not isinstance(listed, list) or not listed or not all(isinstance(name, str) and name for name in listed):
        raise UserError(f"{source} is {shown(listed)}; {_HOSTS} is wanted")
    listed = [*checked_hosts(listed, source)]
    if len(set(listed)) < len(listed):
        raise UserError(f"{source} names a host twice: {', '.join(listed)}")
    # All containers must agree on the order, which SageMaker doesn't promise; numeric, so that algo-2 precedes
    # algo-10.
    return tuple(sorted(listed, key=lambda name: (len(name), name)))
