"""Ranks: which rank a process is, of whichever launcher started it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from samestep.launchers import (
    MpiVariables,
    read_horovodrun,
    read_open_mpi,
    read_pmi,
    read_pytorchjob,
    read_slurm_step,
    read_torchrun,
    slurm_accelerators,
)
from samestep.variables import Environ, Variables

DeviceChoice = Literal["auto", "cpu"]  # what a job wants; auto: the accelerator where there is one
# Of messages between ranks on CPUs; auto: shared memory between the ranks of a host, gloo between hosts.
Transport = Literal["auto", "gloo", "shared-memory"]
Launcher = Literal["torchrun", "horovodrun", "pytorchjob", "open-mpi", "pmi", "slurm"]


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
        if (ranks := launcher(environ)) is not None:
            return ranks
    return None


def _horovodrun(environ: Environ) -> Ranks | None:
    variables = read_horovodrun(environ)
    if variables is None:
        return None
    return Ranks(
        rank=variables.rank,
        world_size=variables.world_size,
        local_rank=variables.local_rank,
        local_world_size=variables.local_world_size,
        one_host=variables.local_world_size == variables.world_size,
        launcher="horovodrun",
    )


def _pytorchjob(environ: Environ) -> Ranks | None:
    """A pod that is one rank. If it is to have several, its ranks are not started yet."""
    pod = read_pytorchjob(environ)
    if pod is None or pod.rank is None or pod.world_size is None:
        return None
    if isinstance(pod.processes, int) and pod.processes > 1:
        return None
    return Ranks(rank=pod.rank, world_size=pod.world_size, local_rank=0, local_world_size=1, launcher="pytorchjob")


def _torchrun(environ: Environ) -> Ranks | None:
    variables = read_torchrun(environ)
    if variables is None:
        return None
    local_size = variables.local_world_size
    return Ranks(
        rank=variables.rank,
        world_size=variables.world_size,
        local_rank=variables.rank if variables.local_rank is None else variables.local_rank,
        local_world_size=variables.world_size if local_size is None else local_size,
        one_host=local_size == variables.world_size,
    )


def _open_mpi(environ: Environ) -> Ranks | None:
    return _of_mpirun(read_open_mpi(environ), "open-mpi")


def _pmi(environ: Environ) -> Ranks | None:
    return _of_mpirun(read_pmi(environ), "pmi")


def _of_mpirun(variables: MpiVariables | None, launcher: Launcher) -> Ranks | None:
    if variables is None or variables.world_size < 2:
        return None
    return Ranks(
        rank=variables.rank,
        world_size=variables.world_size,
        local_rank=variables.local_rank,
        local_world_size=variables.local_world_size,
        one_host=variables.local_world_size == variables.world_size,
        launcher=launcher,
    )


def _slurm(environ: Environ) -> Ranks | None:
    """A task of a step with several. A batch script is none, despite its variables."""
    step = read_slurm_step(environ)
    if step is None or step.tasks < 2:
        return None
    return Ranks(
        rank=step.rank,
        world_size=step.tasks,
        local_rank=step.local_rank,
        local_world_size=step.tasks_per_node[step.node],
        one_host=len(step.tasks_per_node) == 1,
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


def has_a_tasks_accelerators(environ: Environ, seen: int) -> bool:
    """Whether this rank sees only its own accelerators, since srun has divided the host's among its tasks.

    Without --gpus-per-task, or with --gpu-bind=none, every task sees all of the host's.
    """
    ranks = read(environ)
    if ranks is None or ranks.launcher != "slurm":
        return False
    return slurm_accelerators(Variables(environ)) == seen * ranks.local_world_size
