"""Ranks of launchers that number them and no more: who each is, and how they meet, whatever else listens here."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from samestep import environment
from samestep.cluster import beacon, meeting
from samestep.cluster.network.address import LOOPBACK
from samestep.errors import UserError
from samestep.ranks import Ranks

# As Slurm 22.05 sets them for task 3 of 5 on two nodes, and Open MPI 4.1 and MPICH 4 for rank 1 of 2 on one.
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_CLUSTER_NAME": "lab",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_NTASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "3,2",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "0",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_MCA_orte_hnp_uri": "471334912.0;tcp://10.0.0.5,10.1.0.5:47883;tcp6://[fd00::5]:56449",
    "PMIX_NAMESPACE": "471334913",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "3"}
POD = {
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
    "MASTER_ADDR": "job-master-0",
    "MASTER_PORT": "23456",
    "WORLD_SIZE": "2",
    "RANK": "1",
}


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
        {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1"},
        {name: value for name, value in MPICH.items() if name.startswith("PMI")},
        {**POD, "PET_NPROC_PER_NODE": "4"},  # a pod that is to hold four
    ],
)
def test_a_process_that_is_no_rank(environ: Mapping[str, str]) -> None:
    assert who(environ) is None


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({**SLURM, "SLURM_PROCID": "third"}, "SLURM_PROCID='third' is not a whole number"),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "3,3"}, "doesn't say the tasks of node 1 in a step of 5"),
        ({**SLURM, "SLURM_NODEID": "2"}, "SLURM_STEP_TASKS_PER_NODE='3,2' doesn't say the tasks of node 2"),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "some"}, "as 2(x3),1 does"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": ""}, "OMPI_COMM_WORLD_LOCAL_SIZE='' is not a whole number"),
    ],
)
def test_wrong_variables_of_a_rank(environ: Mapping[str, str], message: str) -> None:
    with pytest.raises(UserError) as error:
        environment.ranks(environ)
    assert message in str(error.value)


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


# Where they meet


def launched(environ: Mapping[str, str]) -> meeting.Meeting:
    ranks = environment.ranks(environ)
    assert ranks is not None
    assert meeting.tells_no_address(ranks)
    return meeting.meeting(ranks, environ)


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
    assert set(beacon.ports_of(one)) != set(beacon.ports_of(other))
    assert beacon.ports_of(one) == beacon.ports_of(one)
    assert all(20_000 <= port < 32_000 for port in beacon.ports_of(one))


def test_launchers_that_say_too_little_are_told_what_would_do() -> None:
    with pytest.raises(UserError, match="tell all ranks where to meet by MASTER_ADDR"):
        launched(MPICH)
    nameless = {name: value for name, value in OPEN_MPI.items() if name != "PMIX_NAMESPACE"}
    with pytest.raises(UserError, match="Open MPI's variables don't name the job; tell all ranks where"):
        launched(nameless)


@pytest.mark.parametrize(
    ("addresses", "message"),
    [
        ((), "rank 0's host is nobody to the launcher"),
        (("no-such-host.invalid",), "rank 0's host is no-such-host.invalid to the launcher, and no address is known"),
        (("203.0.113.1",), "and the launcher names 203.0.113.1; tell all ranks where to meet"),
    ],
)
def test_a_host_of_rank_0_that_is_not_known(
    monkeypatch: pytest.MonkeyPatch, addresses: tuple[str, ...], message: str
) -> None:
    monkeypatch.setattr(meeting, "meeting", lambda *_: meeting.Meeting(job="j", addresses=addresses))
    first = Ranks(rank=0, world_size=2, local_rank=0, local_world_size=1, launcher="open-mpi")
    with pytest.raises(UserError) as error:
        meeting.meet(first)
    assert message in str(error.value)


def test_ranks_that_do_not_come_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    job = meeting.Meeting(job=f"alone {os.getpid()}", addresses=(LOOPBACK,))
    monkeypatch.setattr(meeting, "meeting", lambda *_: job)
    first = Ranks(rank=0, world_size=3, local_rank=0, local_world_size=3, launcher="open-mpi")
    with pytest.raises(TimeoutError, match="ranks 1, 2 of 3 did not come within 1 s"):
        meeting.meet(first, timeout=1.0)


@pytest.mark.parametrize("given", ["203.0.113.1", "no-such-host.invalid"])
def test_a_given_address_that_rank_0_has_not(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv("MASTER_ADDR", given)
    monkeypatch.setenv("MASTER_PORT", "29500")
    first = Ranks(rank=0, world_size=2, local_rank=0, local_world_size=1, launcher="slurm")
    with pytest.raises(UserError, match=f"MASTER_ADDR is {given}, which is no address of rank 0's host"):
        meeting.meet(first)


def test_a_given_port_that_is_taken_is_told_with_its_holder(monkeypatch: pytest.MonkeyPatch) -> None:
    first = Ranks(rank=0, world_size=2, local_rank=0, local_world_size=2, one_host=True, launcher="slurm")
    with socket.create_server((LOOPBACK, 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("MASTER_ADDR", LOOPBACK)
        monkeypatch.setenv("MASTER_PORT", str(port))
        with pytest.raises(UserError, match=rf"MASTER_PORT is {port}, which is taken .*process {os.getpid()} of "):
            meeting.meet(first)


# Beacons


@pytest.fixture
def ports(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A few free ports, the same for every job."""
    with_sockets = [socket.create_server((LOOPBACK, 0)) for _ in range(3)]
    free = [each.getsockname()[1] for each in with_sockets]
    for each in with_sockets:
        each.close()
    monkeypatch.setattr(beacon, "ports_of", lambda job: free)
    return free


@contextmanager
def foreign(port: int, says: bytes | None) -> Iterator[None]:
    """A server of another program, which says something to whoever connects; None: it accepts and keeps silent."""
    with socket.create_server((LOOPBACK, port)) as listening:
        kept: list[socket.socket] = []

        def serve() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = listening.accept()
                    kept.append(connection)
                    if says is not None:
                        connection.sendall(says)
                        connection.close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()
        for each in kept:
            each.close()


def test_rank_0_is_heard() -> None:
    with beacon.lit(LOOPBACK, "a job", 2, 4711):
        assert beacon.heard([LOOPBACK], "a job", 2, timeout=5) == (LOOPBACK, 4711)


def test_two_jobs_on_the_same_ports_do_not_mix(ports: list[int]) -> None:
    with beacon.lit(LOOPBACK, "one", 2, 1111), beacon.lit(LOOPBACK, "two", 2, 2222):
        assert beacon.heard([LOOPBACK], "two", 2, timeout=5) == (LOOPBACK, 2222)
        assert beacon.heard([LOOPBACK], "one", 2, timeout=5) == (LOOPBACK, 1111)


@pytest.mark.parametrize(
    "says", [None, b"HTTP/1.1 400 Bad Request\r\n\r\n", b"[1]\n", b'{"job": 3}\n', b"x" * 9000, b""]
)
def test_a_server_of_another_program_is_not_rank_0(
    ports: list[int], says: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beacon, "_PATIENCE", 0.1)
    with foreign(ports[0], says), beacon.lit(LOOPBACK, "a job", 2, 4711):
        assert beacon.heard([LOOPBACK], "a job", 2, timeout=5) == (LOOPBACK, 4711)


def test_rank_0_may_come_last(ports: list[int]) -> None:
    heard: list[tuple[str, int]] = []
    asking = threading.Thread(target=lambda: heard.append(beacon.heard([LOOPBACK], "a job", 2, timeout=20)))
    asking.start()
    time.sleep(0.2)
    with beacon.lit(LOOPBACK, "a job", 2, 4711):
        asking.join(20)
    assert heard == [(LOOPBACK, 4711)]


def test_rank_0_that_is_not_there(ports: list[int]) -> None:
    with pytest.raises(
        TimeoutError, match=r"rank 0 was not heard on 127\.0\.0\.1 within 0 s; where it runs elsewhere"
    ):
        beacon.heard([LOOPBACK], "a job", 2, timeout=0.2)


@pytest.mark.parametrize(("name", "theirs"), [("samestep", "0.0.9"), ("torch", "1.13"), ("world_size", 3)])
def test_ranks_that_differ_are_refused(ports: list[int], name: str, theirs: object) -> None:
    answer = {**beacon._identity("a job", 2), "host": "worker-1", "port": 4711, name: theirs}
    with foreign(ports[0], json.dumps(answer).encode() + b"\n"), pytest.raises(UserError) as error:
        beacon.heard([LOOPBACK], "a job", 2, timeout=5)
    said = str(error.value)
    assert said.startswith(f"{name.replace('_', ' ')} is {theirs} on rank 0's host worker-1, and ")
    assert said.endswith("all ranks of a job must have the same")


def test_no_port_is_free(ports: list[int]) -> None:
    taken = [socket.create_server((LOOPBACK, port)) for port in ports]
    try:
        with pytest.raises(UserError, match=f"none of the ports {', '.join(map(str, sorted(ports)))} is free"):
            beacon.lit(LOOPBACK, "a job", 2, 4711).__enter__()
    finally:
        for each in taken:
            each.close()


# Whole runs. The job's steps are held against one process, so that a wrong rank or a lonely world would show.

JOB = "recipe: {task: regression, args: {samples: 96}, batch: 16, steps: 4}\nrun: {tensorboard: false}\n"


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


SUM = """\
import torch, torch.distributed as dist
from samestep import environment
from samestep.cluster.world import join
with join(device="cpu") as world:
    found = torch.tensor([10.0 + world.rank])
    dist.all_reduce(found)
    print(found.item(), world.world_size, environment.main_address())
"""


def test_ranks_with_a_given_address_meet_there() -> None:
    with socket.create_server((LOOPBACK, 0)) as free:
        given = {**MPICH, "MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(free.getsockname()[1])}
    ranks = [{**given, "PMI_RANK": each, "MPI_LOCALRANKID": each} for each in "01"]
    assert together([sys.executable, "-c", SUM], ranks) == ["21.0 2 127.0.0.1\n"] * 2


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs Open MPI's mpirun (Debian: openmpi-bin)")
def test_mpirun(job: Path) -> None:
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}  # as in a container
    command = ["mpirun", "-np", "2", "--oversubscribe", *verify_of(job)]
    done = subprocess.run(command, env={**os.environ, **root}, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    assert len(re.findall("the same step", done.stdout)) == 1
    assert_same_step(job)
