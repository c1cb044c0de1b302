"""Ranks: what environment variables say of a process, which rank it is and which accelerators are left to it.

`Variables` reads them, here and where hosts are found (`launch/environments`): one way to parse and one message.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from samestep.errors import UserError

Environ = Mapping[str, str]
DeviceChoice = Literal["auto", "cpu"]  # what a job wants; auto: the accelerator where there is one
Launcher = Literal["torchrun", "horovodrun", "pytorchjob", "open-mpi", "pmi", "slurm"]

# Slurm numbers the steps that are not srun's, such as the batch script, from here on.
_NO_STEP = 0xFFFFFFF0


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Which rank this process is."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    # Whether all ranks are known to share this host; unknown if the launcher doesn't say how many do.
    one_host: bool = False
    launcher: Launcher = "torchrun"  # or whatever says it with torchrun's variables


def read(environ: Environ) -> Ranks | None:
    """The rank that a launcher gave this process; None if none did.

    Of launchers inside each other the innermost one counts: torchrun's variables win, and mpirun's over those of the
    Slurm job around it.
    """
    for launcher in _LAUNCHERS:
        if (found := launcher(environ)) is not None:
            return found
    return None


def _horovodrun(environ: Environ) -> Ranks | None:
    """horovodrun with gloo numbers its ranks by HOROVOD_RANK and the like."""
    if not by_horovodrun(environ):
        return None
    world_size, local_size = integer(environ, "HOROVOD_SIZE"), integer(environ, "HOROVOD_LOCAL_SIZE")
    return Ranks(
        rank=integer(environ, "HOROVOD_RANK"),
        world_size=world_size,
        local_rank=integer(environ, "HOROVOD_LOCAL_RANK"),
        local_world_size=local_size,
        one_host=local_size == world_size,
        launcher="horovodrun",
    )


def _pytorchjob(environ: Environ) -> Ranks | None:
    """A pod of a PyTorchJob that is one rank. RANK numbers pods, even if each is to have several ranks."""
    if not in_pytorchjob(environ):
        return None
    processes = environ.get("PET_NPROC_PER_NODE", "1")
    if processes.isdigit() and int(processes) > 1:
        return None  # its ranks are not started yet
    return Ranks(
        rank=integer(environ, "RANK"),
        world_size=integer(environ, "WORLD_SIZE"),
        local_rank=0,
        local_world_size=1,
        launcher="pytorchjob",
    )


def _torchrun(environ: Environ) -> Ranks | None:
    """torchrun's variables, which DeepSpeed's launcher and many others set as well."""
    if "RANK" not in environ or "WORLD_SIZE" not in environ or in_pytorchjob(environ):
        return None
    rank, world_size = integer(environ, "RANK"), integer(environ, "WORLD_SIZE")
    # DeepSpeed's launcher has another name for it.
    named = next((name for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE") if name in environ), None)
    local_size = integer(environ, named) if named is not None else world_size
    return Ranks(
        rank=rank,
        world_size=world_size,
        local_rank=integer(environ, "LOCAL_RANK", rank),
        local_world_size=local_size,
        one_host=named is not None and local_size == world_size,
    )


def _open_mpi(environ: Environ) -> Ranks | None:
    """mpirun of Open MPI."""
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    return _of_many(environ, [f"OMPI_COMM_WORLD_{name}" for name in names], "open-mpi")


def _pmi(environ: Environ) -> Ranks | None:
    """MPICH's and Intel's mpirun; PMI's variables without the local ones may come from elsewhere."""
    return _of_many(environ, ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"], "pmi")


def _of_many(environ: Environ, names: list[str], launcher: Launcher) -> Ranks | None:
    """One of several ranks, if all its variables are set; a single process may start ranks itself."""
    if any(name not in environ for name in names):
        return None
    rank, world_size, local_rank, local_size = (integer(environ, name) for name in names)
    if world_size < 2:
        return None
    return Ranks(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_size,
        one_host=local_size == world_size,
        launcher=launcher,
    )


def _slurm(environ: Environ) -> Ranks | None:
    """A task of a step with several, started by srun. A batch script is none, despite its variables."""
    if not in_slurm_step(environ) or "SLURM_PROCID" not in environ:
        return None
    world_size = integer(environ, "SLURM_STEP_NUM_TASKS", integer(environ, "SLURM_NTASKS", 1))
    if world_size < 2:
        return None
    name = "SLURM_STEP_TASKS_PER_NODE" if "SLURM_STEP_TASKS_PER_NODE" in environ else "SLURM_TASKS_PER_NODE"
    tasks, node = counts(name, environ.get(name, "")), integer(environ, "SLURM_NODEID")
    if node >= len(tasks) or sum(tasks) != world_size:
        raise UserError(
            f"environment variable {name}={environ.get(name)!r} doesn't say the tasks of node {node} in a step of "
            f"{world_size}; srun sets both"
        )
    return Ranks(
        rank=integer(environ, "SLURM_PROCID"),
        world_size=world_size,
        local_rank=integer(environ, "SLURM_LOCALID"),
        local_world_size=tasks[node],
        one_host=len(tasks) == 1,
        launcher="slurm",
    )


_LAUNCHERS: tuple[Callable[[Environ], Ranks | None], ...] = (
    _horovodrun,
    _pytorchjob,
    _torchrun,
    _open_mpi,
    _pmi,
    _slurm,
)


def by_horovodrun(environ: Environ) -> bool:
    """Whether horovodrun started this process, and no launcher inside of it."""
    needed = ("HOROVOD_RANK", "HOROVOD_GLOO_RENDEZVOUS_ADDR")
    return "RANK" not in environ and all(name in environ for name in needed)


def in_pytorchjob(environ: Environ) -> bool:
    """Whether Kubeflow's operator set the variables in this pod, and no launcher has replaced them."""
    pod = "KUBERNETES_SERVICE_HOST" in environ or "PET_NNODES" in environ
    return (
        pod
        and all(name in environ for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"))
        and not any(name in environ for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"))
    )


def in_slurm_step(environ: Environ) -> bool:
    """Whether srun started this process, and not sbatch or salloc."""
    return "SLURM_STEP_ID" in environ and integer(environ, "SLURM_STEP_ID") < _NO_STEP


_COUNT = re.compile(r"(\d{1,6})(?:\(x(\d{1,6})\))?", re.ASCII)


def counts(name: str, text: str) -> list[int]:
    """Expand Slurm's number for each node: 2(x3),1 is 2, 2, 2, 1."""
    found: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part)
        if match is None:
            raise UserError(
                f"environment variable {name}={text!r} doesn't say a number for each node, as 2(x3),1 does"
            )
        found += [int(match[1])] * int(match[2] or 1)
    return found


def accelerators(name: str, text: str) -> int:
    """Parse Slurm's number of accelerators: 4, with a type a100:4, or of several types a100:2,v100:2."""
    numbers = [each.rpartition(":")[2] for each in text.split(",")]
    if not all(number.isascii() and number.isdigit() for number in numbers):
        raise UserError(f"{name} is {text!r}; a number of accelerators such as 4 or a100:4 is wanted")
    return sum(map(int, numbers))


def has_a_tasks_accelerators(environ: Environ, seen: int) -> bool:
    """Whether this rank sees only its own accelerators, since srun has divided the host's among its tasks.

    Without --gpus-per-task, or with --gpu-bind=none, every task sees all of the host's.
    """
    found = read(environ)
    if found is None or found.launcher != "slurm" or "SLURM_GPUS_ON_NODE" not in environ:
        return False
    return integer(environ, "SLURM_GPUS_ON_NODE") == seen * found.local_world_size


@dataclass(frozen=True, kw_only=True)
class VisibleDevices:
    """Accelerators that a variable makes visible to this process, as numbers or ids."""

    variable: str
    devices: tuple[str, ...]


# Of NVIDIA's, AMD's, Intel's and Huawei's accelerators.
DEVICE_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
    "ASCEND_RT_VISIBLE_DEVICES",
)

_NO_DEVICE = ("-1", "NoDevFiles")  # the second is what some versions of Slurm set for a task without accelerators


def visible_devices(environ: Mapping[str, str]) -> VisibleDevices | None:
    """Which accelerators a variable chooses for this process; None where none does. An empty one chooses none."""
    name = next((name for name in DEVICE_VARIABLES if name in environ), None)
    if name is None:
        return None
    devices = tuple(device.strip() for device in environ[name].split(",") if device.strip())
    # Vendors' libraries stop at the first invalid entry.
    end = next((index for index, device in enumerate(devices) if device in _NO_DEVICE), len(devices))
    return VisibleDevices(variable=name, devices=devices[:end])


@dataclass(frozen=True, kw_only=True)
class Read:
    """A variable or line that was read, for display."""

    source: str  # the variable, or the file and its line
    value: str


class Variables:
    """Reads environment variables, and records each that is set, for display. An empty one counts as not set."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._read: dict[str, str] = {}

    def read(self) -> tuple[Read, ...]:
        return tuple(Read(source=name, value=value) for name, value in self._read.items())

    def text(self, name: str) -> str | None:
        """Return a variable's value; None if unset or empty."""
        value = self._environ.get(name, "").strip()
        if not value:
            return None
        self._read[name] = value
        return value

    def first(self, *names: str) -> str | None:
        """Return the value of the first of these variables that is set."""
        return next((value for name in names if (value := self.text(name)) is not None), None)

    def wanted(self, name: str, what: str) -> str:
        """Return the value of a required variable. Raises UserError if it is unset."""
        value = self.text(name)
        if value is None:
            raise UserError(f"{name} is {'empty' if name in self._environ else 'not set'}; it must hold {what}")
        return value

    def number(self, name: str, least: int = 0) -> int | None:
        """Return an integer of at least `least`; None if the variable is unset."""
        text = self.text(name)
        if text is None:
            return None
        if not (text.isascii() and text.isdigit()) or int(text) < least:
            raise UserError(f"{name} is {text!r}; a whole number of {least} or more is wanted")
        return int(text)

    def needed(self, name: str, least: int = 0) -> int:
        """Return a required integer. Raises UserError if it is unset or no integer."""
        self.wanted(name, f"a whole number of {least} or more")
        number = self.number(name, least)
        assert number is not None
        return number

    def json(self, name: str, what: str) -> Any:
        """Parse a variable as JSON; None if unset."""
        text = self.text(name)
        if text is None:
            return None
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            raise UserError(f"{name} is {text!r}, which is not JSON: {error.msg}; {what} is wanted") from None


def integer(environ: Environ, name: str, default: int | None = None) -> int:
    """Return the whole number of a variable; `default` if it is not set. Raises UserError for anything else."""
    if default is not None and name not in environ:
        return default
    return Variables(environ).needed(name)
