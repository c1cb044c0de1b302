"""Ranks of launchers that number them and no more: which rank a process is."""

import os
import subprocess
import sys
from collections.abc import Mapping

import pytest
from launchers import MPICH, OPEN_MPI, POD, SLURM, TORCHRUN
from places import refused

from samestep import environment
from samestep.errors import UserError
from samestep.ranks import Ranks

OMPI_RANKS = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")
OMPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")


def who(environ: Mapping[str, str]) -> tuple[int, int, int, int, bool, str] | None:
    ranks = environment.ranks(environ)
    if ranks is None:
        return None
    local = (ranks.local_rank, ranks.local_world_size)
    return (ranks.rank, ranks.world_size, *local, ranks.one_host, ranks.launcher)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (SLURM, (3, 5, 0, 2, False, "slurm")),
        ({**SLURM, "SLURM_NODEID": "0", "SLURM_PROCID": "2", "SLURM_LOCALID": "2"}, (2, 5, 2, 3, False, "slurm")),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "5", "SLURM_NODEID": "0"}, (3, 5, 0, 5, True, "slurm")),
        (OPEN_MPI, (1, 2, 1, 2, True, "open-mpi")),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "4"}, (1, 4, 1, 2, False, "open-mpi")),
        (MPICH, (1, 2, 1, 2, True, "pmi")),
        (POD, (1, 2, 0, 1, False, "pytorchjob")),
        ({**POD, "PET_NPROC_PER_NODE": "auto"}, (1, 2, 0, 1, False, "pytorchjob")),
        # Of several, the innermost.
        ({**SLURM, **OPEN_MPI}, (1, 2, 1, 2, True, "open-mpi")),
        ({**SLURM, **OPEN_MPI, **TORCHRUN}, (0, 3, 0, 3, True, "torchrun")),
        ({**POD, **TORCHRUN}, (0, 3, 0, 3, True, "torchrun")),
    ],
)
def test_which_rank_a_launcher_made_of_a_process(
    environ: Mapping[str, str], expected: tuple[int, int, int, int, bool, str]
) -> None:
    assert who(environ) == expected


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {name: value for name, value in SLURM.items() if name != "SLURM_STEP_ID"},  # sbatch: a script, and no task
        {**SLURM, "SLURM_STEP_ID": "4294967290"},  # salloc's interactive step
        {**SLURM, "SLURM_STEP_NUM_TASKS": "1"},
        {**OPEN_MPI, **dict.fromkeys(OMPI_SIZES, "1"), **dict.fromkeys(OMPI_RANKS, "0")},  # alone
        {name: value for name, value in MPICH.items() if name.startswith("PMI")},
        {**POD, "PET_NPROC_PER_NODE": "4"},  # a pod that is to hold four
    ],
)
def test_a_process_that_is_no_rank(environ: Mapping[str, str]) -> None:
    assert who(environ) is None


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({**SLURM, "SLURM_PROCID": "third"}, "SLURM_PROCID is 'third'; a whole number of 0 or more"),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "3,3"}, "doesn't say the tasks of node 1 in a step of 5"),
        ({**SLURM, "SLURM_NODEID": "2"}, "SLURM_STEP_TASKS_PER_NODE is '3,2', which doesn't say the tasks of node 2"),
        (
            {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "some"},
            "_TASKS_PER_NODE is 'some'; a number for each node, such as 2(x3),1",
        ),
        (
            {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": ""},
            "OMPI_COMM_WORLD_LOCAL_SIZE is empty; it must hold a whole number",
        ),
    ],
)
def test_wrong_variables_of_a_rank(environ: Mapping[str, str], message: str) -> None:
    with pytest.raises(UserError) as error:
        environment.ranks(environ)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({**SLURM, "SLURM_PROCID": "5"}, "SLURM_PROCID is 5 and SLURM_STEP_NUM_TASKS 5"),
        (
            {**SLURM, "SLURM_LOCALID": "2"},
            "SLURM_LOCALID is 2 and the number of node 1 in SLURM_STEP",
        ),
        ({**MPICH, "PMI_RANK": "2"}, "PMI_RANK is 2 and PMI_SIZE 2"),
        ({**MPICH, "MPI_LOCALNRANKS": "0"}, "MPI_LOCALRANKID is 1 and MPI_LOCALNRANKS 0"),
        ({**TORCHRUN, "LOCAL_RANK": "3"}, "LOCAL_RANK is 3 and LOCAL_WORLD_SIZE 3"),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "GROUP_RANK": "3", "GROUP_WORLD_SIZE": "2"},
            "GROUP_RANK is 3 and GROUP",
        ),
    ],
)
def test_numbers_that_do_not_fit_together_are_refused(environ: Mapping[str, str], message: str) -> None:
    with pytest.raises(UserError) as error:
        environment.ranks(environ)
    assert message in str(error.value)
    assert "they don't fit" in str(error.value)


def test_a_process_of_mpi_is_known_by_its_number_of_ranks_alone() -> None:
    assert environment.under_mpirun({"PMI_RANK": "0", "PMI_SIZE": "2"})
    assert environment.under_mpirun({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"})
    assert not environment.under_mpirun({"PMI_RANK": "0", "PMI_SIZE": "1"})


@pytest.mark.parametrize(
    "environ",
    [
        {**SLURM, "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NODEID": "2"},
        {**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "2"},
        {**POD, "MASTER_PORT": "http"},
        {**TORCHRUN, "RANK": "3"},
    ],
)
def test_the_rank_and_the_hosts_are_read_alike(environ: Mapping[str, str]) -> None:
    with pytest.raises(UserError) as error:
        environment.ranks(environ)
    assert str(error.value) == refused(environ)


def test_wrong_variables_of_a_rank_are_told_without_a_traceback() -> None:
    environ = {**os.environ, **SLURM, "SLURM_PROCID": "third"}
    command = [sys.executable, "-m", "samestep", "train", "none.yaml", "--dry-run"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_a_task_of_srun_has_a_thread_for_each_of_its_cores() -> None:
    asked = {**SLURM, "SLURM_CPUS_PER_TASK": "8"}
    assert environment.asked_threads(asked) == 8
    assert environment.asked_threads({**asked, "OMP_NUM_THREADS": "3"}) == 3
    # Ranks that a task starts by itself share its cores.
    assert environment.asked_threads({**asked, "SLURM_STEP_NUM_TASKS": "1"}) is None
    assert environment.asked_threads({**asked, **TORCHRUN}) is None


def test_ranks_of_horovodrun_are_seen_and_torchruns_come_first() -> None:
    of_horovod = {
        "HOROVOD_RANK": "3",
        "HOROVOD_SIZE": "4",
        "HOROVOD_LOCAL_RANK": "1",
        "HOROVOD_LOCAL_SIZE": "2",
        "HOROVOD_HOSTNAME": "worker-2",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": "4711",
    }
    found = environment.ranks(of_horovod)
    assert found == Ranks(rank=3, world_size=4, local_rank=1, local_world_size=2, launcher="horovodrun")
    run = environment.horovodrun(of_horovod)
    with pytest.raises(UserError, match="HOROVOD_RANK is 4 and HOROVOD_SIZE 4"):
        environment.ranks({**of_horovod, "HOROVOD_RANK": "4"})
    assert run is not None
    assert (run.host, run.address, run.port) == ("worker-2", "10.0.0.1", 4711)
    of_both = {**of_horovod, "RANK": "0", "WORLD_SIZE": "1"}
    assert environment.horovodrun(of_both) is None
    both = environment.ranks(of_both)
    assert both is not None
    assert both.world_size == 1
    with pytest.raises(UserError, match="HOROVOD_SIZE is 'many'; a whole number"):
        environment.ranks({**of_horovod, "HOROVOD_SIZE": "many"})
