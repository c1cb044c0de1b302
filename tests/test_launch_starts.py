"""Who may start what: hosts that a job leaves out, launches inside a launcher, and hosts of which few are taken."""

import argparse
import os
from pathlib import Path
from typing import Any

import pytest
from launching import TOLD

from samestep.cli import launch_options
from samestep.cli.main import main
from samestep.errors import UserError
from samestep.launch.environments.base import FoundCluster, PlaceInputs
from samestep.launch.environments.registry import find
from samestep.launch.filters import apply
from samestep.launch.launcher import check_one_a_host, first_hosts, part_here
from samestep.launch.options import HostOptions, LaunchRequest

pytestmark = pytest.mark.quick


@pytest.fixture
def container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of two containers, which all run the same command."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SM_HOSTS", '["algo-1","algo-2"]')
    monkeypatch.setenv("SM_CURRENT_HOST", "algo-2")
    monkeypatch.setenv("SM_NUM_CPUS", "1")


@pytest.mark.usefixtures("container")
@pytest.mark.parametrize(
    "words", [["--num-nodes", "1"], ["--include", "algo-1"], ["--exclude", "algo-2"], ["--nodes", "1"]]
)
def test_a_host_that_is_left_out_does_not_do_the_job_too(words: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", *words, "--", TOLD, "tell"]) == 2
    out, err = capfd.readouterr()
    assert "is none of the job's: algo-1; leave it out of the start" in err
    assert out == ""


def wanted(**more: Any) -> LaunchRequest:
    return LaunchRequest(command=("train.py",), **more)


@pytest.mark.usefixtures("container")
def test_the_host_that_is_left_does_the_job() -> None:
    found = apply(find(PlaceInputs(environ=os.environ)), HostOptions(include="algo-2"), {})
    spec = part_here(found, wanted())
    assert spec is not None
    assert (spec.host, spec.node_rank, spec.most, spec.address) == ("algo-2", 0, 1, None)


def under(launcher: str, world_size: int, local_size: int) -> dict[str, str]:
    """What a launcher tells the last of its processes, with so many on this host."""
    rank, last = world_size - 1, local_size - 1
    if launcher == "mpirun":
        named = {"SIZE": world_size, "RANK": rank, "LOCAL_SIZE": local_size, "LOCAL_RANK": last}
        return {f"OMPI_COMM_WORLD_{name}": str(number) for name, number in named.items()}
    if launcher == "torchrun":
        named = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": last, "LOCAL_WORLD_SIZE": local_size}
        return {name: str(number) for name, number in named.items()}
    nodes = world_size // local_size
    return {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_JOB_NODELIST": f"n[1-{nodes}]",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(last),
        "SLURM_NODEID": str(nodes - 1),
        "SLURM_STEP_NUM_TASKS": str(world_size),
        "SLURM_NTASKS": str(world_size),
        "SLURM_TASKS_PER_NODE": f"{local_size}(x{nodes})",
        "SLURM_JOB_CPUS_PER_NODE": f"4(x{nodes})",
    }


@pytest.mark.parametrize("sizes", [(4, 4), (4, 2)], ids=["one-host", "two-hosts"])
@pytest.mark.parametrize("launcher", ["mpirun", "srun", "torchrun"])
def test_each_of_several_processes_of_a_host_would_start_all_ranks(
    launcher: str, sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, value in under(launcher, *sizes).items():
        monkeypatch.setenv(name, value)
    assert main(["launch", "--", TOLD, "tell"]) == 2
    out, err = capfd.readouterr()
    assert err.startswith(f"samestep: {launcher} started {sizes[1]} processes on this host, and each would start")
    assert out == ""


@pytest.mark.parametrize("launcher", ["mpirun", "srun", "torchrun"])
def test_one_process_a_host_may_start_ranks(launcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in under(launcher, 2, 1).items():
        monkeypatch.setenv(name, value)
    check_one_a_host()


def test_ranks_whose_launcher_does_not_say_where_they_are_may_be_on_hosts_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    check_one_a_host()


def test_agents_of_open_mpi_5_meet_where_the_user_says() -> None:
    environ = {**under("mpirun", 2, 1), "PMIX_NAMESPACE": "prterun-head-1@1"}
    found = find(PlaceInputs(environ=environ))
    with pytest.raises(UserError, match=r"Open MPI names no address .* --master-addr ADDRESS"):
        part_here(found, wanted())
    spec = part_here(found, wanted(master_addr="10.0.0.5"))
    assert spec is not None
    assert (spec.job, spec.address, spec.node_rank) == ("prterun-head-1-1", "10.0.0.5", 1)
    with pytest.raises(UserError, match='--job-id is "a@1"; use letters, digits'):
        part_here(found, wanted(master_addr="10.0.0.5", job_id="a@1"))


@pytest.fixture
def hosts(tmp_path: Path) -> FoundCluster:
    """This machine first in a hostfile, and another."""
    (tmp_path / "hosts").write_text("localhost slots=2\nworker-2 slots=3\n", encoding="utf-8")
    return find(PlaceInputs(environ={}, hostfile=tmp_path / "hosts"))


@pytest.mark.parametrize("nodes", [(1, 1), (1, 2)])
def test_of_several_hosts_the_first_is_enough(hosts: FoundCluster, nodes: tuple[int, int]) -> None:
    asked = wanted(nodes=nodes)
    spec = part_here(first_hosts(hosts, asked), asked)
    if nodes == (1, 2):
        assert spec is None  # agents are brought up on both
        return
    assert spec is not None
    assert (spec.host, spec.num_procs, spec.most, spec.address) == ("localhost", 2, 1, None)


def test_a_machine_beyond_the_first_hosts_has_no_ranks(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("worker-2 slots=3\nlocalhost slots=2\n", encoding="utf-8")
    found = find(PlaceInputs(environ={}, hostfile=tmp_path / "hosts"))
    asked = wanted(nodes=(1, 1))
    assert part_here(first_hosts(found, asked), asked) is None
    assert first_hosts(found, asked).cluster.this is None


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"nodes": (1, 3)}, "--nodes 1:3, and there are 2 hosts; use 2 or fewer"),
        ({"hosts": HostOptions(num_nodes=3)}, "--num-nodes is 3, and there are 2 hosts; use 2 or fewer"),
        ({"node_rank": 7}, "--node-rank is 7, and 2 hosts have the ranks 0 to 1; use one of them"),
    ],
)
def test_more_hosts_than_there_are(hosts: FoundCluster, asked: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        part_here(hosts, wanted(no_ssh=True, **asked))


@pytest.mark.parametrize(
    ("words", "of_job", "restarts"),
    [
        (["--nodes", "2:4"], {}, 3),
        (["--nodes", "2:4", "--max-restarts", "0"], {}, 0),
        (["--nodes", "2:4", "--max-restarts", "5"], {}, 5),
        (["--nodes", "2:2"], {}, 0),
        ([], {}, 0),
        (["--nodes", "2:4"], {"max_restarts": 1}, 1),
        (["--nodes", "2:4"], {"max_restarts": 0}, 0),
        (["--nodes", "2:4"], {"max_restarts": None}, 3),
    ],
)
def test_a_job_that_may_lose_hosts_has_restarts(words: list[str], of_job: dict[str, Any], restarts: int) -> None:
    parser = argparse.ArgumentParser()
    launch_options.add_arguments(parser)
    asked = launch_options.request_from(parser.parse_args(words), ("train.py",), **of_job)
    fewest, most = asked.nodes or (2, 2)
    assert asked.ranks.restarts(elastic=fewest != most) == restarts
