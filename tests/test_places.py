"""Places: hosts found in files and variables as each place's documentation has them; every wrong input."""

import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from samestep.cluster.discover.hostfile import read_hostfile
from samestep.cluster.discover.place import Found, Given, OwnHost, Slots
from samestep.cluster.discover.resolve import PLACES, check_not_alone, find
from samestep.cluster.discover.slurm_lists import host_names
from samestep.cluster.discover.who_am_i import which
from samestep.errors import UserError
from samestep.ranks import counts


class Here(OwnHost):
    """A machine with these parts, whatever the one of the test has."""

    def __init__(self, name: str = "login-1", accelerators: int = 0, cores: int = 8) -> None:
        self._parts = (name, accelerators, cores)

    @property
    def name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._parts[0]

    @property
    def accelerators(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._parts[1]

    @property
    def cores(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._parts[2]


def at(environ: Mapping[str, str], place: str | None = None, host: OwnHost | None = None, **given: Any) -> Found:
    return find(Given(environ=environ, host=host or Here(), **given), place)


def slots(found: Found) -> dict[str, int]:
    return {host.name: host.slots for host in found.cluster.hosts}


def read(found: Found) -> dict[str, str]:
    return {each.source: each.value for each in found.read}


def refused(environ: Mapping[str, str], **given: Any) -> str:
    with pytest.raises(UserError) as error:
        at(environ, **given)
    return str(error.value)


# This machine


@pytest.mark.parametrize(("accelerators", "count", "counted"), [(0, 8, "cores"), (4, 4, "accelerators")])
def test_this_machine_has_its_accelerators_or_its_cores(accelerators: int, count: int, counted: Slots) -> None:
    found = at({}, host=Here(accelerators=accelerators))
    assert (found.cluster.place, found.cluster.this, found.slots_from) == ("this-machine", 0, counted)
    assert slots(found) == {"localhost": count}
    assert read(found) == {counted: str(count)}


def test_this_machine_shows_the_variable_that_hides_devices() -> None:
    assert read(at({"CUDA_VISIBLE_DEVICES": "2,3"}, host=Here(accelerators=2)))["CUDA_VISIBLE_DEVICES"] == "2,3"


def test_the_real_machine_is_found() -> None:
    found = find(Given(environ={}))
    assert found.cluster.world_size >= 1
    assert found.cluster.this == 0


# A hostfile


@pytest.fixture
def hostfile(tmp_path: Path) -> Path:
    return tmp_path / "hosts"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("worker-1 slots=4\nworker-2 slots=4\n", {"worker-1": 4, "worker-2": 4}),  # DeepSpeed, Horovod
        ("worker-1 slots=2 max_slots=4\nworker-2 slots=1 max-slots=1", {"worker-1": 2, "worker-2": 1}),  # Open MPI
        ("worker-1:4\n10.0.0.7:2\n[fd00::7]:3", {"worker-1": 4, "10.0.0.7": 2, "fd00::7": 3}),  # MPICH, horovodrun -H
        ("node-1\nnode-1\nnode-2", {"node-1": 2, "node-2": 1}),  # a node a line, as PBS and old Open MPI write it
        ("node-1 slots=2\nnode-2 slots=1\nnode-1 slots=3", {"node-1": 5, "node-2": 1}),
        ("# head\n\n  worker-1\tslots=4  # fast\r\n#worker-2 slots=4\n", {"worker-1": 4}),
        ("worker-1 slots=0\nworker-2 slots=1", {"worker-2": 1}),
        ("worker-1.rack.example slots=8", {"worker-1.rack.example": 8}),
    ],
)
def test_a_hostfile_is_read(hostfile: Path, text: str, expected: dict[str, int]) -> None:
    hostfile.write_text(text, encoding="utf-8")
    found = at({}, hostfile=hostfile)
    assert slots(found) == expected
    assert found.cluster.place == "hostfile"
    assert not found.on_every_host


def test_the_lines_of_a_hostfile_are_shown(hostfile: Path) -> None:
    hostfile.write_text("# head\nworker-1 slots=4 # x\n", encoding="utf-8")
    assert read(at({}, hostfile=hostfile)) == {f"{hostfile}:2": "worker-1 slots=4"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it names no host with a slot; a line such as worker-1 slots=4 would do"),
        ("# nobody\n", "it names no host with a slot"),
        ("worker-1 slots=0", "it names no host with a slot"),
        ("\nworker-1 slots=four", 'line 2: "slots=four": slots are a whole number'),
        ("worker-1 slots=-1", 'line 1: "slots=-1": slots are a whole number'),
        ("worker-1 slots", 'line 1: "slots" is not known'),
        ("worker-1 slot=4", 'line 1: "slot=4" is not known; a line such as worker-1 slots=4 would do'),
        ("worker-1 slots=4 slots=2", '"slots=2" says the slots of worker-1 a second time'),
        ("worker-1:4 slots=2", '"slots=2" says the slots of worker-1:4 a second time'),
        ("worker-1 slots=4 max_slots=2", "slots=4 is more than max_slots=2"),
        ("worker-1:2222", "a host has 1024 at most; if it is a port, say it in OpenSSH's configuration"),
        ("-oProxyCommand=x slots=2", '"-oProxyCommand=x" is no host'),
        ("user@worker-1 slots=2", '"user@worker-1" is no host'),
        ("worker-1, slots=2", '"worker-1," is no host'),
    ],
)
def test_a_wrong_hostfile(hostfile: Path, text: str, message: str) -> None:
    hostfile.write_text(text, encoding="utf-8")
    said = refused({}, hostfile=hostfile)
    assert f"--hostfile {hostfile}" in said
    assert message in said


def test_a_hostfile_that_is_none(tmp_path: Path) -> None:
    assert "No such file" in refused({}, hostfile=tmp_path / "none")
    assert "directory" in refused({}, hostfile=tmp_path)
    (tmp_path / "picture").write_bytes(b"\xff\xfe\x00")
    assert "it is no text" in refused({}, hostfile=tmp_path / "picture")


@pytest.mark.parametrize(
    ("names", "own", "this"),
    [
        (["worker-1", "worker-2"], "worker-2", 1),
        (["worker-1.rack.example", "worker-2.rack.example"], "worker-2", 1),
        (["worker-1", "worker-2"], "worker-2.rack.example", 1),
        (["worker-1", "localhost"], "elsewhere", 1),
        (["203.0.113.1", "127.0.0.1"], "elsewhere", 1),
        (["203.0.113.1", "203.0.113.2"], "elsewhere", None),
        (["no-such-host.invalid"], "elsewhere", None),
        (["node.a.example", "node.b.example"], "node.b.example", 1),
    ],
)
def test_which_host_this_is(names: list[str], own: str, this: int | None) -> None:
    assert which(names, own) == this


def test_no_name_server_is_asked_which_host_this_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: pytest.fail("a name was looked up"))
    assert which(["ib-1", "ib-2", "127.0.0.2"], "elsewhere") == 2  # all of 127.0.0.0/8 is this machine
    assert which(["ib-1", "ib-2"], "elsewhere") is None


# Slurm


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("host-a", ["host-a"]),
        ("host-b,host-a", ["host-b", "host-a"]),
        ("gpu[01-03,7]-x,host-b", ["gpu01-x", "gpu02-x", "gpu03-x", "gpu7-x", "host-b"]),
        ("gnode[10,20,25,37]", ["gnode10", "gnode20", "gnode25", "gnode37"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("r[1-2]n[08-09]", ["r1n08", "r1n09", "r2n08", "r2n09"]),
        ("tux[3]", ["tux3"]),
        ("[1-2].example", ["1.example", "2.example"]),
    ],
)
def test_slurm_lists_of_hosts(text: str, names: list[str]) -> None:
    assert host_names("SLURM_JOB_NODELIST", text) == names


@pytest.mark.parametrize(
    "text", ["", ",", "a,,b", "a[1-", "a]1", "a[]", "a[3-1]", "a[1-x]", "a b", "a[1,]", "a[0-999999]"]
)
def test_a_wrong_slurm_list(text: str) -> None:
    with pytest.raises(UserError, match=r"SLURM_JOB_NODELIST is .* is no part of a list of hosts such as gpu\["):
        host_names("SLURM_JOB_NODELIST", text)


def test_slurm_numbers_for_each_node() -> None:
    assert counts("SLURM_TASKS_PER_NODE", "2(x3),1") == [2, 2, 2, 1]
    assert counts("SLURM_TASKS_PER_NODE", "16") == [16]
    for wrong in ("", "2(x)", "2x3", "2,", "-1"):
        with pytest.raises(UserError, match="SLURM_TASKS_PER_NODE"):
            counts("SLURM_TASKS_PER_NODE", wrong)


# A batch script on the first of three nodes, of which the job asked for 5 tasks.
BATCH = {
    "SLURM_JOB_ID": "200505",
    "SLURM_JOB_NODELIST": "gpu[01-03]",
    "SLURM_JOB_NUM_NODES": "3",
    "SLURM_JOB_CPUS_PER_NODE": "72(x2),36",
    "SLURM_TASKS_PER_NODE": "2(x2),1",
    "SLURM_NTASKS": "5",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_CPUS_ON_NODE": "72",
}


def test_slurm_in_a_batch_script() -> None:
    found = at(BATCH)
    assert (found.cluster.place, found.cluster.this, found.cluster.job) == ("slurm", 0, "200505")
    assert slots(found) == {"gpu01": 2, "gpu02": 2, "gpu03": 1}
    assert found.slots_from == "listed"
    assert not found.on_every_host
    assert read(found)["SLURM_TASKS_PER_NODE"] == "2(x2),1"


def test_slurm_without_tasks_has_cores_and_with_gpus_has_those() -> None:
    batch = {name: value for name, value in BATCH.items() if name != "SLURM_NTASKS"}
    assert slots(at(batch)) == {"gpu01": 72, "gpu02": 72, "gpu03": 36}
    assert slots(at({**batch, "SLURM_CPUS_PER_TASK": "8"})) == {"gpu01": 9, "gpu02": 9, "gpu03": 4}
    for variables in ({"SLURM_GPUS_ON_NODE": "4"}, {"SLURM_GPUS_PER_NODE": "a100:4"}, {"SLURM_GPUS_PER_NODE": "4"}):
        found = at({**BATCH, **variables})
        assert slots(found) == {"gpu01": 4, "gpu02": 4, "gpu03": 4}
        assert found.slots_from == "accelerators"


def test_slurm_from_the_login_node_is_none_of_its_hosts() -> None:
    salloc = {name: value for name, value in BATCH.items() if name not in ("SLURM_NODEID", "SLURM_PROCID")}
    assert at(salloc).cluster.this is None
    assert at(salloc, host=Here(name="gpu02")).cluster.this == 1


def test_slurm_one_task_a_node_is_there_on_every_host() -> None:
    step = {
        **BATCH,
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "gpu[02-03]",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_NTASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_NODEID": "1",
        "SLURM_PROCID": "1",
    }
    found = at(step)
    assert found.on_every_host
    assert found.cluster.this == 1
    assert slots(found) == {"gpu02": 72, "gpu03": 36}
    assert slots(at({**step, "SLURM_CPUS_PER_TASK": "16"})) == {"gpu02": 16, "gpu03": 16}
    alone = {**step, "SLURM_STEP_NODELIST": "gpu03", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NODEID": "0"}
    assert slots(at(alone)) == {"gpu03": 36}
    assert not at(alone).on_every_host
    elsewhere = {**step, "SLURM_STEP_NODELIST": "gpu[03-04]"}
    assert "SLURM_STEP_NODELIST names gpu04, which is not in SLURM_JOB_NODELIST" in refused(elsewhere)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"SLURM_JOB_NODELIST": "gpu[01-"}, "SLURM_JOB_NODELIST is 'gpu[01-'"),
        ({"SLURM_TASKS_PER_NODE": "2(x2)"}, "doesn't say a number for each of 3 nodes"),
        ({"SLURM_TASKS_PER_NODE": "two"}, "SLURM_TASKS_PER_NODE='two'"),
        ({"SLURM_TASKS_PER_NODE": ""}, "SLURM_TASKS_PER_NODE is not set"),
        ({"SLURM_NODEID": "3"}, "SLURM_NODEID is 3, and SLURM_JOB_NODELIST names 3"),
        ({"SLURM_NODEID": "first"}, "SLURM_NODEID is 'first'; a whole number of 0 or more is wanted"),
        ({"SLURM_GPUS_ON_NODE": "a lot"}, "SLURM_GPUS_ON_NODE is 'a lot'"),
        ({"SLURM_GPUS_PER_NODE": "a100"}, "SLURM_GPUS_PER_NODE is 'a100'; a number of accelerators such as 4"),
        ({"SLURM_STEP_ID": "x"}, "SLURM_STEP_ID='x' is not a whole number"),
    ],
)
def test_wrong_slurm_variables(change: dict[str, str], message: str) -> None:
    assert message in refused({**BATCH, **change})


# Open MPI


OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_UNIVERSE_SIZE": "4",
    "PMIX_NAMESPACE": "1834352641",
    "OMPI_MCA_orte_hnp_uri": "1834352640.0;tcp://10.0.0.5:37865;tcp6://[fd00::5]:56449",
}


def test_open_mpi_on_one_host() -> None:
    found = at(OPEN_MPI, host=Here(name="worker-1"))
    assert (found.cluster.place, found.cluster.this, found.cluster.job) == ("open-mpi", 0, "1834352641")
    assert slots(found) == {"worker-1": 4}
    assert not found.on_every_host


def test_open_mpi_4_says_how_many_hosts_there_are() -> None:
    unequal = {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "7", "OMPI_MCA_orte_num_nodes": "2"}
    assert slots(at(unequal)) == {"(host 0)": 4, "(host 1)": 3}


def test_open_mpi_with_one_process_a_host_is_there_on_every_host() -> None:
    one_each = {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_RANK": "2"}
    one_each |= {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    found = at(one_each, host=Here(name="worker-3", accelerators=2))
    assert found.on_every_host
    assert found.cluster.this == 2
    assert found.main_address == "10.0.0.5"
    assert slots(found) == {"(host 0)": 2, "(host 1)": 2, "worker-3": 2}
    for uri, named in (("1.0;tcp://10.0.0.5,10.1.0.5:37865", "10.0.0.5 and 10.1.0.5"), ("", "no address")):
        found = at({**one_each, "OMPI_MCA_orte_hnp_uri": uri})
        assert found.main_address is None
        assert f"Open MPI names {named} for mpirun's host" in (found.no_address or "")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"OMPI_COMM_WORLD_RANK": "4"}, "they don't fit, so mpirun has not set all of them"),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "5"}, "they don't fit"),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "3"}, "this Open MPI doesn't say how many hosts share them"),
        ({"OMPI_MCA_orte_num_nodes": "2"}, "4 ranks on 2 hosts, and 4 of them on this one; they don't fit"),
        ({"OMPI_COMM_WORLD_SIZE": "many"}, "OMPI_COMM_WORLD_SIZE is 'many'; a whole number of 1 or more is wanted"),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": ""}, "OMPI_COMM_WORLD_LOCAL_SIZE is not set"),
    ],
)
def test_wrong_open_mpi_variables(change: dict[str, str], message: str) -> None:
    assert message in refused({**OPEN_MPI, **change})


# SageMaker, from the documentation of its training toolkit


SAGEMAKER = {
    "SM_HOSTS": '["algo-1","algo-2"]',
    "SM_CURRENT_HOST": "algo-2",
    "SM_NUM_GPUS": "0",
    "SM_NUM_CPUS": "32",
    "SM_NETWORK_INTERFACE_NAME": "ethwe",
    "SM_RESOURCE_CONFIG": '{"current_host":"algo-2","hosts":["algo-1","algo-2"],"network_interface_name":"ethwe"}',
    "SAGEMAKER_JOB_NAME": "reviews-2026-11-21",
}


def test_sagemaker() -> None:
    found = at(SAGEMAKER)
    assert (found.cluster.place, found.cluster.this, found.cluster.job) == ("sagemaker", 1, "reviews-2026-11-21")
    assert slots(found) == {"algo-1": 32, "algo-2": 32}
    assert (found.on_every_host, found.interface, found.slots_from) == (True, "ethwe", "cores")
    assert slots(at({**SAGEMAKER, "SM_NUM_GPUS": "8"})) == {"algo-1": 8, "algo-2": 8}


def test_sagemaker_by_its_resource_config_alone() -> None:
    found = at({"SM_RESOURCE_CONFIG": SAGEMAKER["SM_RESOURCE_CONFIG"]}, host=Here(accelerators=4))
    assert slots(found) == {"algo-1": 4, "algo-2": 4}
    assert (found.cluster.this, found.interface) == (1, "ethwe")


def test_sagemaker_numbers_ten_hosts_alike_whatever_their_order() -> None:
    names = '["algo-1","algo-10","algo-2"]'
    found = at({**SAGEMAKER, "SM_HOSTS": names})
    assert list(slots(found)) == ["algo-1", "algo-2", "algo-10"]
    assert found.cluster.this == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"SM_HOSTS": '["algo-1"'}, "SM_HOSTS is '[\"algo-1\"', which is not JSON"),
        ({"SM_HOSTS": "algo-1,algo-2"}, 'a list of hosts such as ["algo-1","algo-2"] is wanted'),
        ({"SM_HOSTS": "[]"}, "SM_HOSTS is []"),
        ({"SM_HOSTS": '["algo-2","algo-2"]'}, "SM_HOSTS names a host twice"),
        ({"SM_HOSTS": "[1, 2]"}, "SM_HOSTS is [1, 2]"),
        ({"SM_CURRENT_HOST": "algo-3"}, "SM_CURRENT_HOST is 'algo-3', which is none of algo-1, algo-2"),
        ({"SM_NUM_GPUS": "some"}, "SM_NUM_GPUS is 'some'"),
        ({"SM_NUM_CPUS": "0"}, "SM_NUM_CPUS is '0'; a whole number of 1 or more is wanted"),
        ({"SM_RESOURCE_CONFIG": "[]"}, "SM_RESOURCE_CONFIG is no mapping"),
        ({"SM_RESOURCE_CONFIG": "{"}, "SM_RESOURCE_CONFIG is '{', which is not JSON"),
        ({"SM_HOSTS": "", "SM_RESOURCE_CONFIG": "{}"}, '"hosts" in SM_RESOURCE_CONFIG is None'),
    ],
)
def test_wrong_sagemaker_variables(change: dict[str, str], message: str) -> None:
    assert message in refused({**SAGEMAKER, **change})


# A PyTorchJob, from the code of Kubeflow's training operator


PYTORCHJOB = {
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
    "MASTER_ADDR": "reviews-master-0",
    "MASTER_PORT": "23456",
    "WORLD_SIZE": "8",
    "RANK": "1",
    "PET_NPROC_PER_NODE": "4",
    "PET_NODE_RANK": "1",
    "PET_NNODES": "2",
}


def test_a_pytorchjob() -> None:
    found = at(PYTORCHJOB, host=Here(name="reviews-worker-0"))
    assert (found.cluster.place, found.cluster.this) == ("pytorchjob", 1)
    assert slots(found) == {"reviews-master-0": 4, "reviews-worker-0": 4}
    assert (found.main_address, found.main_port, found.on_every_host) == ("reviews-master-0", 23456, True)


def test_a_pytorchjob_of_an_old_operator_counts_pods() -> None:
    old = {name: value for name, value in PYTORCHJOB.items() if not name.startswith("PET_")} | {"WORLD_SIZE": "3"}
    found = at(old, host=Here(name="reviews-worker-0", accelerators=2))
    assert slots(found) == {"reviews-master-0": 2, "reviews-worker-0": 2, "(host 2)": 2}


@pytest.mark.parametrize(
    ("processes", "accelerators", "expected"), [("auto", 0, 8), ("auto", 2, 2), ("gpu", 2, 2), ("cpu", 2, 8)]
)
def test_ranks_of_a_pod_in_words(processes: str, accelerators: int, expected: int) -> None:
    found = at({**PYTORCHJOB, "PET_NPROC_PER_NODE": processes}, host=Here(accelerators=accelerators))
    assert set(slots(found).values()) == {expected}


def test_an_elastic_pytorchjob_without_a_master() -> None:
    elastic = {"PET_RDZV_ENDPOINT": "reviews-worker-0:29400", "PET_NNODES": "1:3", "PET_NPROC_PER_NODE": "2"}
    found = at(elastic, host=Here(name="reviews-worker-2"))
    assert slots(found) == {"reviews-worker-0": 2, "(host 1)": 2, "reviews-worker-2": 2}
    assert (found.cluster.this, found.main_address, found.main_port) == (2, "reviews-worker-0", 29400)
    assert at(elastic, host=Here(name="elsewhere")).cluster.this is None
    assert "PET_RDZV_ENDPOINT is 'reviews'" in refused({**elastic, "PET_RDZV_ENDPOINT": "reviews"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"PET_NPROC_PER_NODE": "all"}, "PET_NPROC_PER_NODE is 'all'; a number of 1 or more, auto, gpu or cpu"),
        ({"PET_NPROC_PER_NODE": "0"}, "PET_NPROC_PER_NODE is '0'"),
        ({"PET_NPROC_PER_NODE": "gpu"}, "this pod has no accelerator that PyTorch can use"),
        ({"PET_NNODES": "1:2:3"}, "PET_NNODES is '1:2:3'"),
        ({"PET_NNODES": "0"}, "PET_NNODES is '0'"),
        ({"PET_NODE_RANK": "2"}, "PET_NODE_RANK is 2, and the job has 2 pods, counted from 0"),
        ({"PET_NODE_RANK": "", "RANK": "5"}, "RANK is 5, and the job has 2 pods"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT is 'http'"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0'"),
    ],
)
def test_wrong_pytorchjob_variables(change: dict[str, str], message: str) -> None:
    assert message in refused({**PYTORCHJOB, **change})


# torchrun


TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "worker-1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
}


def test_torchrun() -> None:
    found = at(TORCHRUN, host=Here(name="worker-2"))
    assert (found.cluster.place, found.cluster.this, found.cluster.job) == ("torchrun", 1, "none")
    assert slots(found) == {"worker-1": 2, "worker-2": 2}
    assert read(found).keys() >= TORCHRUN.keys() - {"TORCHELASTIC_RUN_ID"}


def test_torchrun_on_unequal_hosts() -> None:
    unequal = {**TORCHRUN, "WORLD_SIZE": "6", "GROUP_WORLD_SIZE": "3"}
    assert list(slots(at(unequal, host=Here(name="worker-2"))).values()) == [2, 2, 2]
    assert list(slots(at({**unequal, "WORLD_SIZE": "5"}, host=Here(name="worker-2"))).values()) == [2, 2, 1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK": "4"}, "they don't fit, so torchrun has not set all of them"),
        ({"GROUP_RANK": "2"}, "they don't fit"),
        ({"LOCAL_WORLD_SIZE": "5"}, "they don't fit"),
        (
            {"LOCAL_WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "2"},
            "4 ranks on 2 hosts, and 4 of them on this one; they don't fit",
        ),
        ({"GROUP_WORLD_SIZE": "1", "GROUP_RANK": "0"}, "4 ranks on 1 hosts, and 2 of them on this one"),
        ({"LOCAL_RANK": "x"}, "LOCAL_RANK is 'x'"),
    ],
)
def test_wrong_torchrun_variables(change: dict[str, str], message: str) -> None:
    assert message in refused({**TORCHRUN, **change})


# Ray


def ray_node(address: str, *, alive: bool = True, head: bool = False, **resources: float) -> dict[str, Any]:
    """A node as ray.nodes() tells it."""
    marks = {f"node:{address}": 1.0, **({"node:__internal_head__": 1.0} if head else {})}
    return {"NodeManagerAddress": address, "Alive": alive, "Resources": {**marks, **resources}}


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A package that tells what Ray would; `nodes_there` are its nodes, `asked` where it was looked for."""
    module = ModuleType("ray")
    module.__spec__ = sys.__spec__  # found, as an installed package is
    module.nodes_there = []  # type: ignore[attr-defined]
    module.asked = []  # type: ignore[attr-defined]
    module.is_initialized = lambda: False  # type: ignore[attr-defined]
    module.init = lambda address, **_: module.asked.append(address)  # type: ignore[attr-defined]
    module.nodes = lambda: module.nodes_there  # type: ignore[attr-defined]
    module.shutdown = lambda: module.asked.append("shutdown")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", module)
    return module


def test_ray(ray: Any) -> None:
    ray.nodes_there = [
        ray_node("10.0.0.3", CPU=16.0, GPU=4.0),
        ray_node("10.0.0.9", head=True, CPU=16.0, GPU=4.0),
        ray_node("10.0.0.1", CPU=16.0, GPU=4.0, alive=False),
        ray_node("10.0.0.2", CPU=64.0),
    ]
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        for found in (at({}, ray=address), at({"RAY_ADDRESS": address})):
            assert slots(found) == {"10.0.0.9": 4, "10.0.0.3": 4}
            assert found.slots_from == "accelerators"
    assert ray.asked == [address, "shutdown"] * 2
    ray.nodes_there = [ray_node("10.0.0.2", CPU=64.0), ray_node("10.0.0.1", CPU=2.0)]
    assert slots(at({}, ray="auto")) == {"10.0.0.1": 2, "10.0.0.2": 64}


def test_ray_without_nodes_or_an_answer(ray: Any) -> None:
    assert "a Ray cluster without a live node that has a CPU" in refused({}, ray="auto")

    assert "--ray is 127.0.0.1:1, where nothing answers: " in refused({}, ray="127.0.0.1:1")
    assert "where nothing answers" in refused({"RAY_ADDRESS": "127.0.0.1:99999"})

    def nobody(address: str, **_: object) -> None:
        raise ConnectionError("could not find any running Ray instance")

    ray.init = nobody
    assert "where no Ray cluster answers: could not find any running Ray instance" in refused({}, ray="auto")


def test_ray_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "RAY_ADDRESS is auto, and Ray is not installed" in refused({"RAY_ADDRESS": "auto"})


# Which place is taken


def test_what_the_user_names_wins(hostfile: Path) -> None:
    hostfile.write_text("worker-1 slots=2\n", encoding="utf-8")
    everything = {**BATCH, **OPEN_MPI, **SAGEMAKER, **TORCHRUN}
    assert at(everything, hostfile=hostfile).cluster.place == "hostfile"


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        ({**BATCH, **TORCHRUN}, "torchrun"),
        ({**SAGEMAKER, **TORCHRUN}, "torchrun"),
        ({**PYTORCHJOB, **TORCHRUN}, "torchrun"),
        ({**BATCH, **OPEN_MPI}, "open-mpi"),
        ({**SAGEMAKER, **OPEN_MPI}, "open-mpi"),
        ({**BATCH, "RAY_ADDRESS": "auto"}, "slurm"),
        ({"SLURM_JOB_ID": "7"}, "this-machine"),
    ],
)
def test_the_innermost_launcher_wins(environ: dict[str, str], place: str) -> None:
    assert at(environ).cluster.place == place


def test_a_place_can_be_chosen() -> None:
    assert at({**BATCH, **OPEN_MPI}, "slurm").cluster.place == "slurm"
    assert at(BATCH, "this-machine").cluster.place == "this-machine"


def test_a_place_that_is_wrong(hostfile: Path) -> None:
    names = ", ".join(sorted(each.name for each in PLACES))
    assert refused({}, place="slrm") == f'--place "slrm" is not known; did you mean "slurm"? known: {names}'
    assert '--place "slurm": SLURM_JOB_ID would show it; what shows here: this-machine' in refused({}, place="slurm")
    assert '--place "hostfile": --hostfile FILE would show it' in refused({}, place="hostfile")
    said = refused(BATCH, place="slurm", hostfile=hostfile)
    assert said == '--place "slurm" and --hostfile FILE are two places; leave one of them out'
    both = refused({}, hostfile=hostfile, ray="auto")
    assert both == "--hostfile FILE and --ray ADDRESS or RAY_ADDRESS both name hosts; leave one of them out"


@pytest.mark.parametrize("environ", [SAGEMAKER, PYTORCHJOB])
def test_hosts_that_would_each_do_the_whole_job_are_refused(environ: dict[str, str]) -> None:
    with pytest.raises(UserError, match=r"this is one of 2 hosts of a \w+ job, which all run this command"):
        check_not_alone(environ)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        BATCH,
        {"RAY_ADDRESS": "auto"},
        {**SAGEMAKER, "SM_HOSTS": '["algo-2"]'},
        {**SAGEMAKER, **TORCHRUN},
        {**PYTORCHJOB, "PET_NNODES": "1", "PET_NODE_RANK": "0"},
    ],
)
def test_a_job_that_one_command_starts_is_not_refused(environ: dict[str, str]) -> None:
    check_not_alone(environ)


def test_a_hostfile_is_read_without_looking_for_this_machine(hostfile: Path) -> None:
    hostfile.write_text("worker-1 slots=2\nworker-2\n", encoding="utf-8")
    hosts, _ = read_hostfile(hostfile)
    assert [(host.name, host.slots) for host in hosts] == [("worker-1", 2), ("worker-2", 1)]
