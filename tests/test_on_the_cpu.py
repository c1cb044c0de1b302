"""Jobs on the CPU of hosts that have accelerators: their slots are cores, and their ranks see no accelerator."""

import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from launching import SCRIPTS
from pretended import accelerators

import samestep.launch.launcher
from samestep.cli.main import main
from samestep.launch import agent, consistency
from samestep.launch.affinity import cores
from samestep.launch.environments.base import OwnHost, PlaceInputs
from samestep.launch.environments.registry import find
from samestep.launch.failure import JobOutcome
from samestep.launch.filters import apply
from samestep.launch.node_spec import NodeSpec
from samestep.launch.options import HostOptions, LaunchRequest, RankOptions
from samestep.ranks import DeviceChoice

# PyTorch's elastic agent leaves the files of ranks that have ended to the garbage collector.
pytestmark = [
    pytest.mark.usefixtures("folder_of_its_own"),
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
]


@pytest.fixture
def one_accelerator(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """This host has one, as far as this process sees."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    accelerators(monkeypatch, otherwise=1)
    return monkeypatch


SHOW = "import os, sys; print(os.environ['LOCAL_RANK'], [os.environ.get(name) for name in sys.argv[1:]])"


def test_ranks_of_a_launch_on_the_cpu_see_no_accelerator(
    one_accelerator: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    one_accelerator.setenv("ROCR_VISIBLE_DEVICES", "0")
    Path("show.py").write_text(SHOW, encoding="utf-8")
    command = ["--", "show.py", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"]
    Path("hosts").write_text("localhost slots=2\n", encoding="utf-8")
    assert main(["launch", "--hostfile", "hosts", "--device", "cpu", *command]) == 0
    out, _ = capfd.readouterr()
    assert sorted(out.splitlines()) == [f"[localhost {rank}] {rank} ['', '', None]" for rank in (0, 1)]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"


@pytest.mark.usefixtures("one_accelerator")
def test_more_slots_than_accelerators_are_refused_unless_the_job_is_on_the_cpu() -> None:
    part = NodeSpec(
        job="one", host="worker-2", num_procs=2, command=(str(SCRIPTS / "told.py"),), ranks=RankOptions(logs="logs")
    )
    outcome = agent.run(part)
    assert outcome.exit_code == 2
    assert outcome.message == (
        "worker-2: 2 slots are asked for, and there is 1 accelerator that CUDA_VISIBLE_DEVICES=0 leaves; use "
        "1 or fewer, or --device cpu for a job on the CPU"
    )


class WithAccelerators(OwnHost):
    accelerators = 4  # pyright: ignore[reportAssignmentType]
    cores = 16  # pyright: ignore[reportAssignmentType]


STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_JOB_CPUS_PER_NODE": "32(x2)",
    "SLURM_GPUS_ON_NODE": "4",
    "SLURM_GPUS_PER_TASK": "4",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "CUDA_VISIBLE_DEVICES": "0,1,2,3",
}


@pytest.mark.parametrize(
    ("environ", "slots"),
    [
        ({}, {"auto": [4], "cpu": [16]}),
        ({"CUDA_VISIBLE_DEVICES": "2,3"}, {"auto": [2], "cpu": [16]}),
        (STEP, {"auto": [4, 4], "cpu": [32, 32]}),
        (
            {"SM_HOSTS": '["a","b"]', "SM_CURRENT_HOST": "a", "SM_NUM_GPUS": "8", "SM_NUM_CPUS": "96"},
            {"auto": [8, 8], "cpu": [96, 96]},
        ),
        (
            {"PET_RDZV_ENDPOINT": "j-worker-0:1", "PET_NNODES": "1:2", "PET_NPROC_PER_NODE": "auto"},
            {"auto": [4, 4], "cpu": [16, 16]},
        ),
        (
            {
                **{f"OMPI_COMM_WORLD_{name}": "2" for name in ("SIZE",)},
                **{f"OMPI_COMM_WORLD_{name}": "1" for name in ("LOCAL_SIZE", "RANK")},
                "OMPI_COMM_WORLD_LOCAL_RANK": "0",
                "OMPI_MCA_orte_num_nodes": "2",
            },
            {"auto": [4, 4], "cpu": [16, 16]},
        ),
    ],
    ids=["this machine", "a variable", "Slurm", "SageMaker", "PyTorchJob", "Open MPI"],
)
def test_slots_of_a_job_on_the_cpu_are_cores(environ: dict[str, str], slots: dict[Any, list[int]]) -> None:
    for device, expected in slots.items():
        found = find(PlaceInputs(environ=environ, host=WithAccelerators(), device=device))
        taken = apply(found, HostOptions(), environ, device)
        assert [host.slots for host in taken.cluster.hosts] == expected
        assert taken.slots_from == ("cores" if device == "cpu" else "accelerators")


def test_what_is_visible_does_not_count_for_listed_slots_on_the_cpu() -> None:
    Path("hosts").write_text("localhost slots=4\n", encoding="utf-8")
    environ = {"CUDA_VISIBLE_DEVICES": "2,3"}
    found = find(PlaceInputs(environ=environ, hostfile=Path("hosts")))
    assert [apply(found, HostOptions(), environ, device).cluster.world_size for device in ("auto", "cpu")] == [2, 4]


JOB: dict[str, Any] = {"recipe": {"task": "regression", "batch": 16, "steps": 1}, "run": {"layout": "dp2"}}


@pytest.mark.parametrize(
    ("run", "words", "device"),
    [({"device": "cpu"}, [], "cpu"), ({}, ["--device", "cpu"], "cpu"), ({}, [], "auto")],
    ids=["in the file", "on the command line", "neither"],
)
def test_a_job_of_samesteps_says_its_device_to_the_launch(
    run: dict[str, str], words: list[str], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("job.yaml").write_text(yaml.safe_dump({**JOB, "run": {**JOB["run"], **run}}), encoding="utf-8")
    asked: list[LaunchRequest] = []

    def start(found: object, wanted: LaunchRequest, variables: object, secret: object) -> JobOutcome:
        asked.append(wanted)
        return JobOutcome()

    monkeypatch.setattr(samestep.launch.launcher, "launch", start)
    assert main(["train", "job.yaml", "--num-procs", "2", *words]) == 0
    assert [wanted.ranks.device for wanted in asked] == [device]
    assert asked[0].command[-len(words) :] == tuple(words) if words else asked[0].command[-1] == "job.yaml"


def test_hosts_that_differ_in_it_do_not_begin() -> None:
    told = []
    devices: dict[str, DeviceChoice] = {"host-a": "auto", "host-b": "cpu"}
    for host, device in devices.items():
        ranks = RankOptions(logs="logs", device=device)
        spec = NodeSpec(job="one", host=host, num_procs=1, command=("x",), ranks=ranks)
        told.append({"host": host, **consistency.facts_of(spec)})
    found = consistency.difference(told[0], told[1])
    assert found is not None
    assert 'differ in their device: host-a has "auto", host-b has "cpu"; give both the same' in found[1]


def test_hosts_show_what_a_job_on_the_cpu_would_get(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(OwnHost, "accelerators", 3)
    for words, count in (([], 3), (["--device", "cpu"], cores())):
        assert main(["hosts", *words]) == 0
        assert f"1 host, {count} slot" in capsys.readouterr().out


def test_pods_of_a_job_on_the_cpu_ask_for_no_accelerator(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "--k8s", "--image", "x", "--num-procs", "8", "--device", "cpu", "--", "train.py"]) == 0
    job = yaml.safe_load(capsys.readouterr().out)
    (container,) = job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"]
    assert container["command"] == ["samestep", "launch", "--device", "cpu", "--", "train.py"]
    assert "resources" not in container
    assert job["spec"]["nprocPerNode"] == "8"


@pytest.mark.parametrize("command", ["launch", "hosts"])
def test_another_device_is_refused(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--device", "tpu", *(["--", "train.py"] if command == "launch" else [])]) == 2
    assert "argument --device: invalid choice: 'tpu'" in capsys.readouterr().err
