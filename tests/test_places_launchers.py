"""Hosts in the variables of Slurm, LSF, Open MPI and torchrun; every wrong input."""

import pytest
from places import BATCH, LSF, OPEN_MPI, TORCHRUN, Here, at, read, refused, slots

from samestep.errors import UserError
from samestep.launch.environments.slurm import host_names
from samestep.launchers import slurm_counts

pytestmark = pytest.mark.quick

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


@pytest.mark.parametrize("text", ["", ",", "a,,b", "a[1-", "a]1", "a[]", "a[3-1]", "a[1-x]", "a b", "a[1,]"])
def test_a_wrong_slurm_list(text: str) -> None:
    with pytest.raises(UserError, match=r"SLURM_JOB_NODELIST is .* is no part of a list of hosts such as gpu\["):
        host_names("SLURM_JOB_NODELIST", text)


def test_slurm_numbers_for_each_node() -> None:
    assert slurm_counts("SLURM_TASKS_PER_NODE", "2(x3),1") == [2, 2, 2, 1]
    assert slurm_counts("SLURM_TASKS_PER_NODE", "16") == [16]
    for wrong in ("", "2(x)", "2x3", "2,", "-1"):
        with pytest.raises(UserError, match="SLURM_TASKS_PER_NODE"):
            slurm_counts("SLURM_TASKS_PER_NODE", wrong)


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
        ({"SLURM_JOB_NODELIST": "n1,n1,n2"}, "SLURM_JOB_NODELIST names n1 twice; name each host once"),
        ({"SLURM_JOB_NODELIST": "n1,N1"}, "SLURM_JOB_NODELIST names N1 twice (n1 is the same); name each host once"),
        ({"SLURM_JOB_NODELIST": "n[1-2],n[2-3]"}, "SLURM_JOB_NODELIST names n2 twice"),
        ({"SLURM_JOB_NODELIST": "n[1-2,1]"}, "SLURM_JOB_NODELIST names n1 twice"),
        ({"SLURM_TASKS_PER_NODE": "2(x2)"}, "doesn't say a number for each of 3 nodes"),
        (
            {"SLURM_TASKS_PER_NODE": "two"},
            "SLURM_TASKS_PER_NODE is 'two'; a number for each node, such as",
        ),
        ({"SLURM_TASKS_PER_NODE": ""}, "SLURM_TASKS_PER_NODE is empty; it must hold a number for each node"),
        ({"SLURM_NODEID": "3"}, "SLURM_NODEID is 3, and SLURM_JOB_NODELIST names 3"),
        ({"SLURM_NODEID": "first"}, "SLURM_NODEID is 'first'; a whole number of 0 or more is wanted"),
        ({"SLURM_GPUS_ON_NODE": "a lot"}, "SLURM_GPUS_ON_NODE is 'a lot'"),
        ({"SLURM_GPUS_PER_NODE": "a100"}, "SLURM_GPUS_PER_NODE is 'a100'; a number of accelerators such as 4"),
        ({"SLURM_STEP_ID": "x"}, "SLURM_STEP_ID is 'x'; a whole number of 0 or more"),
    ],
)
def test_wrong_slurm_variables(change: dict[str, str], message: str) -> None:
    assert message in refused({**BATCH, **change})


# LSF


def test_lsf() -> None:
    found = at(LSF, host=Here("host-a.cluster.example"))
    assert (found.cluster.place, found.cluster.this, found.cluster.job) == ("lsf", 0, "4711")
    assert slots(found) == {"host-a": 2, "host-b": 1}
    assert (found.slots_from, found.on_every_host) == ("listed", False)
    assert read(found) == {name: LSF[name] for name in ("LSB_JOBID", "LSB_MCPU_HOSTS")}
    assert at({**LSF, "LSB_MCPU_HOSTS": "host-a 2 host-b 1 host-a 1"}).cluster.hosts[0].slots == 3


def test_lsf_counts_the_accelerators_of_this_host() -> None:
    host = Here("host-a", accelerators=4)
    assert slots(at(LSF, host=host)) == {"host-a": 4, "host-b": 4}
    assert slots(at(LSF, host=host, device="cpu")) == {"host-a": 2, "host-b": 1}
    from_elsewhere = at(LSF, host=Here("login-1", accelerators=4))
    assert (slots(from_elsewhere), from_elsewhere.cluster.this) == ({"host-a": 2, "host-b": 1}, None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"LSB_JOBID": ""}, "LSB_JOBID is empty; it must hold the job's number"),
        ({"LSB_MCPU_HOSTS": ""}, "LSB_MCPU_HOSTS is empty; it must hold hosts and their slots, such as host-a 4"),
        ({"LSB_MCPU_HOSTS": "host-a 2 host-b"}, "where host-b has no slots; hosts and their slots, such as"),
        ({"LSB_MCPU_HOSTS": "host-a host-b"}, '"host-b" is no number of slots'),
        ({"LSB_MCPU_HOSTS": "host-a 0"}, '"0" is no number of slots'),
        ({"LSB_MCPU_HOSTS": "-oProxyCommand=x 1"}, '"-oProxyCommand=x" is no host'),
    ],
)
def test_wrong_lsf_variables(change: dict[str, str], message: str) -> None:
    assert message in refused({**LSF, **change})


# Open MPI


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
        (
            {"OMPI_COMM_WORLD_RANK": "4"},
            "OMPI_COMM_WORLD_SIZE 4, counted from 0; they don't fit, so mpirun has not set both",
        ),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "4"}, "OMPI_COMM_WORLD_LOCAL_RANK is 4 and OMPI_COMM_WORLD_LOCAL_SIZE 4"),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "5"}, "they don't fit"),
        (
            {"OMPI_COMM_WORLD_LOCAL_SIZE": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "2"},
            "this Open MPI doesn't say how many hosts share them",
        ),
        ({"OMPI_MCA_orte_num_nodes": "2"}, "4 ranks on 2 hosts, and 4 of them on this one; they don't fit"),
        ({"OMPI_COMM_WORLD_SIZE": "many"}, "OMPI_COMM_WORLD_SIZE is 'many'; a whole number of 1 or more is wanted"),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": ""}, "OMPI_COMM_WORLD_LOCAL_SIZE is empty; it must hold a whole number"),
    ],
)
def test_wrong_open_mpi_variables(change: dict[str, str], message: str) -> None:
    assert message in refused({**OPEN_MPI, **change})


# torchrun


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
        ({"RANK": "4"}, "RANK is 4 and WORLD_SIZE 4, counted from 0; they don't fit, so torchrun has not set both"),
        ({"GROUP_RANK": "2"}, "GROUP_RANK is 2 and GROUP_WORLD_SIZE 2"),
        ({"LOCAL_WORLD_SIZE": "5"}, "LOCAL_WORLD_SIZE is 5, of a WORLD_SIZE of 4"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK is 2 and LOCAL_WORLD_SIZE 2"),
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
