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
        if (found := launcher(environ)) is not None:
            return found
    return None


def _horovodrun(environ: Environ) -> Ranks | None:
    found = read_horovodrun(environ)
    if found is None:
        return None
    return Ranks(
        rank=found.rank,
        world_size=found.world_size,
        local_rank=found.local_rank,
        local_world_size=found.local_world_size,
        one_host=found.local_world_size == found.world_size,
        launcher="horovodrun",
    )


def _pytorchjob(environ: Environ) -> Ranks | None:
    """A pod that is one rank. If it is to have several, its ranks are not started yet."""
    found = read_pytorchjob(environ)
    if found is None or found.rank is None or found.world_size is None:
        return None
    if isinstance(found.processes, int) and found.processes > 1:
        return None
    return Ranks(
        rank=found.rank, world_size=found.world_size, local_rank=0, local_world_size=1, launcher="pytorchjob"
    )


def _torchrun(environ: Environ) -> Ranks | None:
    found = read_torchrun(environ)
    if found is None:
        return None
    local_size = found.local_world_size
    return Ranks(
        rank=found.rank,
        world_size=found.world_size,
        local_rank=found.rank if found.local_rank is None else found.local_rank,
        local_world_size=found.world_size if local_size is None else local_size,
        one_host=local_size == found.world_size,
    )


def _open_mpi(environ: Environ) -> Ranks | None:
    return _of_mpirun(read_open_mpi(environ), "open-mpi")


def _pmi(environ: Environ) -> Ranks | None:
    return _of_mpirun(read_pmi(environ), "pmi")


def _of_mpirun(found: MpiVariables | None, launcher: Launcher) -> Ranks | None:
    if found is None or found.world_size < 2:
        return None
    return Ranks(
        rank=found.rank,
        world_size=found.world_size,
        local_rank=found.local_rank,
        local_world_size=found.local_world_size,
        one_host=found.local_world_size == found.world_size,
        launcher=launcher,
    )


def _slurm(environ: Environ) -> Ranks | None:
    """A task of a step with several. A batch script is none, despite its variables."""
    found = read_slurm_step(environ)
    if found is None or found.tasks < 2:
        return None
    return Ranks(
        rank=found.rank,
        world_size=found.tasks,
        local_rank=found.local_rank,
        local_world_size=found.tasks_per_node[found.node],
        one_host=len(found.tasks_per_node) == 1,
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
    found = read(environ)
    if found is None or found.launcher != "slurm":
        return False
    return slurm_accelerators(Variables(environ)) == seen * found.local_world_size
