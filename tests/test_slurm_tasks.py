"""Slurm jobs that ask for so many accelerators a task: the slots of their nodes, and the accelerator of each rank."""

from collections.abc import Mapping
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import pretended
import pytest
import torch

from samestep.errors import UserError
from samestep.launch import device
from samestep.launch.controller import AgentConnection, AgentEnded, Event, Line
from samestep.launch.environments import slurm
from samestep.launch.environments.base import FoundCluster, PlaceInputs
from samestep.launch.environments.registry import find
from samestep.launch.filters import apply
from samestep.launch.node_spec import NodeSpec
from samestep.launch.options import HostOptions, LaunchOptions, RankOptions
from samestep.launch.starter import AgentCommand

# sbatch -N2 -n3 --gpus-per-task=2, as its script finds it on the first node.
BATCH = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "gpu[1-2]",
    "SLURM_JOB_CPUS_PER_NODE": "8(x2)",
    "SLURM_NTASKS": "3",
    "SLURM_TASKS_PER_NODE": "2,1",
    "SLURM_GPUS_PER_TASK": "2",
    "SLURM_GPUS_ON_NODE": "4",
    "SLURM_NODEID": "0",
    "CUDA_VISIBLE_DEVICES": "0,1,2,3",
}

# One of the tasks that srun starts in it, the second on the first node. Each sees its own accelerators.
TASK = {
    **BATCH,
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[1-2]",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
    "CUDA_VISIBLE_DEVICES": "2,3",
}

# srun --ntasks-per-node=1 --gpus-per-task=2: a task that is to start its node's ranks.
AGENT = {
    **TASK,
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_NTASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_GPUS_ON_NODE": "2",
    "CUDA_VISIBLE_DEVICES": "0,1",
}


def at(environ: Mapping[str, str]) -> FoundCluster:
    return apply(find(PlaceInputs(environ=environ)), HostOptions(), environ)


def without(environ: Mapping[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


@pytest.mark.parametrize(
    ("environ", "slots", "counted"),
    [
        (BATCH, [4, 2], "accelerators"),
        # The shell of salloc is on none of the nodes.
        (without(BATCH, "SLURM_GPUS_ON_NODE", "SLURM_NODEID", "CUDA_VISIBLE_DEVICES"), [4, 2], "accelerators"),
        ({**BATCH, "SLURM_GPUS_PER_TASK": "a100:1,v100:1"}, [4, 2], "accelerators"),
        ({**BATCH, "SLURM_GPUS_PER_NODE": "4"}, [4, 4], "accelerators"),
        (without(BATCH, "SLURM_TASKS_PER_NODE"), [4, 4], "accelerators"),  # as on the node that can be seen
        (TASK, [2, 1], "listed"),  # the tasks are the ranks
        (without(TASK, "SLURM_GPUS_PER_TASK"), [2, 1], "listed"),  # srun by itself does not set it
        ({**TASK, "CUDA_VISIBLE_DEVICES": "1"}, [2, 1], "listed"),
        (AGENT, [2, 2], "accelerators"),
        ({**AGENT, "SLURM_GPUS_PER_TASK": "1"}, [2, 2], "accelerators"),  # of the job, and the step has others
        # Of a job with more a node, from which the step has taken so many.
        ({**AGENT, "SLURM_GPUS_PER_NODE": "8"}, [2, 2], "accelerators"),
    ],
)
def test_the_slots_of_nodes(environ: dict[str, str], slots: list[int], counted: str) -> None:
    found = at(environ)
    assert [host.slots for host in found.cluster.hosts] == slots
    assert found.slots_from == counted


@pytest.mark.parametrize("text", ["a100", "-1", "two", "a100:"])
def test_a_wrong_number_a_task(text: str) -> None:
    with pytest.raises(UserError, match=f"SLURM_GPUS_PER_TASK is '{text}'; a number of accelerators such as 4"):
        at({**BATCH, "SLURM_GPUS_PER_TASK": text})


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A host with as many accelerators as the variable names."""
    pretended.accelerators(monkeypatch, otherwise=0)
    return monkeypatch


@pytest.mark.parametrize(
    ("tasks", "on_node", "visible", "index"),
    [
        (2, 4, "2,3", 0),  # --gpus-per-task=2: two of its own
        (2, 2, "1", 0),  # --gpus-per-task=1
        (2, 2, "0,1", 1),  # --gpus-per-node=2, or --gpu-bind=none: both see both
        (2, 4, "0,1,2,3", 1),  # --gpus-per-task=2 --gpu-bind=none
        (4, 4, "0,1", 1),  # --gpu-bind=closest: two tasks see the same two
        (2, 1, "0", 0),  # --ntasks-per-gpu=2
    ],
)
def test_the_accelerator_of_a_task(
    host: pytest.MonkeyPatch, tasks: int, on_node: int, visible: str, index: int
) -> None:
    changes = {
        "SLURM_STEP_NUM_TASKS": f"{tasks}",
        "SLURM_STEP_TASKS_PER_NODE": f"{tasks}",
        "SLURM_GPUS_ON_NODE": f"{on_node}",
        "CUDA_VISIBLE_DEVICES": visible,
    }
    for name, value in {**TASK, **changes}.items():
        host.setenv(name, value)
    assert device.device_of(1) == torch.device("cuda", index)
    if tasks == 2:
        device.check_devices(2, in_a_rank=True)


def test_tasks_that_share_too_few_are_refused(host: pytest.MonkeyPatch) -> None:
    changes = {"SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_TASKS_PER_NODE": "3", "SLURM_GPUS_ON_NODE": "2"}
    for name, value in {**TASK, **changes, "CUDA_VISIBLE_DEVICES": "0,1"}.items():
        host.setenv(name, value)
    with pytest.raises(UserError, match="3 processes on this host, which has 2 accelerators"):
        device.check_devices(3, in_a_rank=True)


@pytest.mark.parametrize("value", ["NoDevFiles", "", "-1"])
def test_a_task_without_accelerators(value: str) -> None:
    visible = device.environment.visible_devices({"CUDA_VISIBLE_DEVICES": value})
    assert visible is not None
    assert visible.devices == ()


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
def test_an_agent_gets_all_that_its_node_has_though_the_job_asked_by_the_task(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in BATCH.items():
        monkeypatch.setenv(name, value)
    (agents,) = slurm.STARTER.agent_commands(specs("gpu1", "gpu2"), WAYS)
    assert "--gpus=6" in agents.command
    (agents,) = slurm.STARTER.agent_commands(specs("gpu2"), WAYS)
    assert "--gpus=2" in agents.command
    assert started_with(agents, "SLURM_GPUS_PER_TASK", "SLURM_JOB_ID") == "none 7"


@pytest.mark.parametrize(
    ("changes", "device"),
    [({}, "cpu"), ({"SLURM_GPUS_PER_TASK": ""}, "auto"), ({"SLURM_GPUS_PER_NODE": "4"}, "auto")],
    ids=["on the CPU", "so many in all", "so many a node"],
)
def test_where_slurm_gives_an_agent_all_by_itself_it_is_not_asked(
    changes: dict[str, str], device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**BATCH, **changes}.items():
        if value:
            monkeypatch.setenv(name, value)
    if "SLURM_GPUS_PER_NODE" in changes:
        monkeypatch.delenv("SLURM_GPUS_PER_TASK")
    (agents,) = slurm.STARTER.agent_commands(specs("gpu1", device=device), WAYS)
    assert not any(word.startswith("--gpus") for word in agents.command)


def test_srun_gives_its_tasks_no_variable_that_stays_here(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**BATCH, "HF_TOKEN": "hf_s3cret", "WANDB_MODE": "offline"}.items():
        monkeypatch.setenv(name, value)
    (agents,) = slurm.STARTER.agent_commands(specs("gpu1"), replace(WAYS, kept_back=("HF_TOKEN",)))
    assert started_with(agents, "HF_TOKEN", "WANDB_MODE") == "none offline"


WAYS = LaunchOptions(remote_python=("python",))


def specs(*hosts: str, device: Any = "auto") -> list[NodeSpec]:
    ranks = RankOptions(logs="logs", device=device)
    return [NodeSpec(host=host, job="7", num_procs=1, command=("x",), ranks=ranks) for host in hosts]


def started_with(agents: AgentCommand, *names: str) -> str:
    """What a process that starts agents on other hosts finds in these variables."""
    command = ("sh", "-c", "echo " + " ".join(f"${{{name}:-none}}" for name in names))
    events: SimpleQueue[Event] = SimpleQueue()
    AgentConnection(AgentCommand(command=command, specs=agents.specs, without=agents.without), b"", events)
    lines = []
    while not isinstance(event := events.get(timeout=10), AgentEnded):
        if isinstance(event, Line):
            lines.append(event.text.decode().strip())
    return " ".join(lines)
