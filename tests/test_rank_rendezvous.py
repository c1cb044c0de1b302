"""Ranks of launchers that number them and no more: how they meet."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from launchers import MPICH, OPEN_MPI, SLURM
from launching import free_port

from samestep import environment
from samestep.errors import UserError
from samestep.launch import local, rank_rendezvous
from samestep.launch.environments.base import RendezvousInfo
from samestep.launch.network import LOOPBACK
from samestep.launch.world import join
from samestep.ranks import Ranks


def launched(environ: Mapping[str, str]) -> RendezvousInfo:
    ranks = environment.ranks(environ)
    assert ranks is not None
    assert rank_rendezvous.tells_no_address(ranks)
    return rank_rendezvous.rendezvous_info(ranks, environ)


def test_ranks_of_a_job_know_where_to_meet() -> None:
    found = launched(SLURM)
    assert (found.addresses, found.other) == (("n1",), "n2")
    several = {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "4"}
    assert launched(several).addresses == ("10.0.0.5", "10.1.0.5", "fd00::5")
    assert launched(OPEN_MPI).addresses == (LOOPBACK,)


@pytest.mark.parametrize(
    ("environ", "change"),
    [
        (SLURM, {"SLURM_JOB_ID": "8"}),
        (SLURM, {"SLURM_STEP_ID": "1"}),
        (SLURM, {"SLURM_CLUSTER_NAME": "lab2"}),
        (SLURM, {"SLURM_RESTART_COUNT": "1"}),
        (OPEN_MPI, {"PMIX_NAMESPACE": "471334914"}),
        (OPEN_MPI, {"OMPI_MCA_orte_hnp_uri": "471334912.0;tcp://10.0.0.6:47883"}),
    ],
)
def test_jobs_have_names_and_ports_of_their_own(environ: Mapping[str, str], change: Mapping[str, str]) -> None:
    one, other = launched(environ).job, launched({**environ, **change}).job
    assert one != other
    assert set(rank_rendezvous.ports_of(one)) != set(rank_rendezvous.ports_of(other))
    assert rank_rendezvous.ports_of(one) == rank_rendezvous.ports_of(one)
    assert all(20_000 <= port < 32_000 for port in rank_rendezvous.ports_of(one))


def test_launchers_that_say_too_little_are_told_what_would_do() -> None:
    with pytest.raises(UserError, match="tell all ranks where to meet by MASTER_ADDR"):
        launched(MPICH)
    nameless = {name: value for name, value in OPEN_MPI.items() if name != "PMIX_NAMESPACE"}
    with pytest.raises(UserError, match="Open MPI's variables don't name the job; tell all ranks where"):
        launched(nameless)


@pytest.mark.parametrize(
    ("addresses", "message"),
    [
        ((), "rank 0's host is unnamed to the launcher"),
        (("no-such-host.invalid",), "rank 0's host is no-such-host.invalid to the launcher, and no address is known"),
        (("203.0.113.1",), "and the launcher names 203.0.113.1; tell all ranks where to meet"),
    ],
)
def test_a_host_of_rank_0_that_is_not_known(
    monkeypatch: pytest.MonkeyPatch, addresses: tuple[str, ...], message: str
) -> None:
    monkeypatch.setattr(rank_rendezvous, "rendezvous_info", lambda *_: RendezvousInfo(job="j", addresses=addresses))
    first = Ranks(rank=0, world_size=2, local_rank=0, local_world_size=1, launcher="open-mpi")
    with pytest.raises(UserError) as error:
        rank_rendezvous.meet(first)
    assert message in str(error.value)


def test_ranks_that_do_not_come_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    job = RendezvousInfo(job=f"alone {os.getpid()}", addresses=(LOOPBACK,))
    monkeypatch.setattr(rank_rendezvous, "rendezvous_info", lambda *_: job)
    first = Ranks(rank=0, world_size=3, local_rank=0, local_world_size=3, launcher="open-mpi")
    with pytest.raises(TimeoutError, match="ranks 1, 2 of 3 did not come within 1 s"):
        rank_rendezvous.meet(first, timeout=1.0)


def both_meet() -> tuple[rank_rendezvous.JoinedStore, rank_rendezvous.JoinedStore]:
    """What two ranks of a job have after they met, each of which takes the other for one of another host."""
    ranks = [Ranks(rank=rank, world_size=2, local_rank=0, local_world_size=1, launcher="slurm") for rank in range(2)]
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(partial(rank_rendezvous.meet, timeout=20.0), ranks)
    first.store.set("from rank 0", "heard")
    assert second.store.get("from rank 0") == b"heard"
    assert (first.address, first.port) == (second.address, second.port)
    return first, second


@pytest.mark.parametrize("given", [None, LOOPBACK])
def test_ranks_hear_rank_0_where_the_launcher_says_or_a_given_address_without_a_port(
    monkeypatch: pytest.MonkeyPatch, given: str | None
) -> None:
    if given is not None:
        monkeypatch.setenv("MASTER_ADDR", given)
    named = RendezvousInfo(job=f"both {os.getpid()}", addresses=("no-such-host.invalid" if given else LOOPBACK,))
    monkeypatch.setattr(rank_rendezvous, "rendezvous_info", lambda *_: named)
    first, _ = both_meet()
    assert first.address == LOOPBACK


def test_rank_0_whose_hosts_name_is_on_the_loopback_is_heard_where_the_other_host_reaches_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def named(ranks: Ranks, _: object) -> RendezvousInfo:
        address = "localhost" if ranks.rank == 0 else "127.0.0.3"
        return RendezvousInfo(job=f"loopback {os.getpid()}", addresses=(address,), other="n2")

    monkeypatch.setattr(rank_rendezvous, "rendezvous_info", named)
    monkeypatch.setattr(rank_rendezvous, "address_towards", {"n2": "127.0.0.3"}.__getitem__)
    first, _ = both_meet()
    assert first.address == "127.0.0.3"


def test_a_given_name_on_the_loopback_is_served_at_all_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", str(port))
    first = Ranks(rank=0, world_size=2, local_rank=0, local_world_size=1, launcher="slurm")
    found = rank_rendezvous.meet(first)
    assert (found.address, found.port) == ("localhost", port)
    socket.create_connection(("127.0.0.2", port), timeout=5).close()  # as from another host


@pytest.mark.parametrize("given", ["203.0.113.1", "no-such-host.invalid"])
def test_a_given_address_that_rank_0_has_not(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv("MASTER_ADDR", given)
    monkeypatch.setenv("MASTER_PORT", "29500")
    first = Ranks(rank=0, world_size=2, local_rank=0, local_world_size=1, launcher="slurm")
    with pytest.raises(UserError, match=f"MASTER_ADDR is {given}, which is no address of rank 0's host"):
        rank_rendezvous.meet(first)


def test_a_given_port_that_is_taken_is_told_with_its_holder(monkeypatch: pytest.MonkeyPatch) -> None:
    first = Ranks(rank=0, world_size=2, local_rank=0, local_world_size=2, one_host=True, launcher="slurm")
    with socket.create_server((LOOPBACK, 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("MASTER_ADDR", LOOPBACK)
        monkeypatch.setenv("MASTER_PORT", str(port))
        with pytest.raises(
            UserError, match=rf"MASTER_PORT is {port}, which on rank 0's host is taken by .*process {os.getpid()} of "
        ):
            rank_rendezvous.meet(first)


# Whole runs. The job's steps are held against one process, so that a wrong rank or a lonely world would show.

JOB = "recipe: {task: regression, args: {samples: 96}, batch: 16, steps: 4}\nrun: {log: []}\n"


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "job.yaml").write_text(JOB, encoding="utf-8")
    return tmp_path / "job.yaml"


def verify_of(job: Path) -> list[str]:
    return [
        sys.executable,
        "-m",
        "samestep",
        "verify",
        str(job),
        "--layout",
        "dp2",
        "--json",
        str(job.parent / "proof"),
    ]


def together(command: list[str], environs: Sequence[Mapping[str, str]]) -> list[str]:
    """What processes print that are started beside each other with these variables."""
    started = [
        subprocess.Popen(
            command,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for environ in environs
    ]
    try:
        said = [process.communicate(timeout=150)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * len(started), said
    return said


def assert_same_step(job: Path) -> None:
    proof = json.loads((job.parent / "proof").read_text(encoding="utf-8"))
    assert proof["same_step"]
    assert proof["layout"] == "dp2"


@pytest.mark.slow
def test_ranks_of_srun_on_two_hosts_meet(job: Path) -> None:
    # Two names of this host: their ranks take each other for ranks of other hosts.
    nodes = {**SLURM, "SLURM_STEP_NODELIST": "127.0.0.1,127.0.0.2", "SLURM_JOB_ID": str(os.getpid())}
    nodes |= {"SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    said = together(verify_of(job), [{**nodes, "SLURM_NODEID": each, "SLURM_PROCID": each} for each in "01"])
    assert "the same step" in said[0]
    assert said[1] == ""  # one of them talks
    assert_same_step(job)


def sum_of_ranks(given: Mapping[str, str]) -> tuple[float, int, str | None]:
    """In a rank that finds these variables, as of a launcher's task: the sum over ranks of 10 and the rank."""
    rank = os.environ["RANK"]
    environment.become({**given, "PMI_RANK": rank, "MPI_LOCALRANKID": rank})
    with join(device="cpu") as world:
        found = torch.tensor([10.0 + world.rank])
        dist.all_reduce(found)
        return found.item(), world.world_size, environment.main_address()


def test_ranks_with_a_given_address_meet_there() -> None:
    given = {**MPICH, "MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(free_port())}
    assert local.start(sum_of_ranks, (given,), 2) == (21.0, 2, LOOPBACK)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs Open MPI's mpirun (Debian: openmpi-bin)")
def test_mpirun(job: Path) -> None:
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}  # as in a container
    command = ["mpirun", "-np", "2", "--oversubscribe", *verify_of(job)]
    done = subprocess.run(command, env={**os.environ, **root}, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    assert len(re.findall("the same step", done.stdout)) == 1
    assert_same_step(job)
