"""Every way to start one job on two hosts: what is typed, on which hosts, with which variables."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from on_hosts import python, torchrun
from slurm_on_hosts import PROGRAMS as SLURM
from testbed import Testbed


@dataclass(frozen=True, kw_only=True)
class Start:
    """A command on a host."""

    host: str
    command: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Where a job is started: the hosts, a folder that they share, and the job's own command."""

    bed: Testbed
    folder: Path
    train: Sequence[str]  # samestep train job.yaml ..., as a module's name and its arguments

    @property
    def hostfile(self) -> Path:
        file = self.folder / "hosts"
        file.write_text("host-a slots=1\nhost-b slots=1\n")
        return file


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to start."""

    place: str
    shown: str  # as a user types it
    starts: Callable[[Setting], Sequence[Start]]
    needs: str | None = None  # a fixture that makes the place
    programs: Sequence[str] = ()
    package: str | None = None
    tried: str = "2 hosts, a rank each"


def on_each(
    command: Callable[[int], Sequence[str]], env: Callable[[int], Mapping[str, str]] | None = None
) -> list[Start]:
    return [
        Start(host=name, command=command(rank), env=env(rank) if env else {})
        for rank, name in enumerate(("host-a", "host-b"))
    ]


def on_first(*command: str, host: str = "host-a", **env: str) -> list[Start]:
    return [Start(host=host, command=command, env=env)]


def launch(*options: str, train: Sequence[str]) -> list[str]:
    return [*python("samestep", "launch", *options), "--", "-m", *train]


def _sbatch(at: Setting) -> list[Start]:
    command = " ".join(launch("--num-procs", "1", train=at.train))
    script = at.folder / "batch.sh"
    script.write_text(f"#!/bin/sh\n#SBATCH --nodes=2 --output={at.folder}/batch.log\nexec {command}\n")
    # --wait: sbatch ends when the job does, with its exit code.
    return on_first("sbatch", "--wait", str(script))


def sagemaker(rank: int) -> Mapping[str, str]:
    hosts = ["host-a", "host-b"]
    config = {"current_host": hosts[rank], "hosts": hosts, "network_interface_name": "eth0"}
    return {
        "SM_HOSTS": json.dumps(hosts),
        "SM_CURRENT_HOST": hosts[rank],
        "SM_NUM_GPUS": "0",
        "SM_NUM_CPUS": "1",
        "SM_NETWORK_INTERFACE_NAME": "eth0",
        "SM_RESOURCE_CONFIG": json.dumps(config),
        "SAGEMAKER_JOB_NAME": "job-of-a-test",
    }


def _pod(rank: int) -> Mapping[str, str]:
    return {
        "KUBERNETES_SERVICE_HOST": "10.96.0.1",
        "MASTER_ADDR": "host-a",
        "MASTER_PORT": "23456",
        "WORLD_SIZE": "2",
        "RANK": str(rank),
        "PET_NNODES": "2",
        "PET_NODE_RANK": str(rank),
        "PET_NPROC_PER_NODE": "1",
    }


MPIRUN = ("mpirun", "--allow-run-as-root", "-np", "2", "--host", "host-a:1,host-b:1", "-x", "PYTHONPATH")
HOROVODRUN = (str(Path(sys.executable).with_name("horovodrun")), "--gloo", "-np", "2", "-H", "host-a:1,host-b:1")

OVER_SSH = Way(
    place="hostfile, over SSH",
    shown="samestep launch --hostfile hosts -- -m samestep train job.yaml",
    starts=lambda at: on_first(*launch("--hostfile", str(at.hostfile), train=at.train)),
)
WITHOUT_SSH = Way(
    place="without SSH",
    shown="samestep launch --no-ssh --node-rank N --num-nodes 2 --master-addr host-a -- -m samestep train job.yaml",
    starts=lambda at: on_each(
        lambda rank: launch(
            *("--no-ssh", "--node-rank", str(rank), "--num-nodes", "2", "--num-procs", "1"),
            *("--master-addr", "host-a", "--job-id", "job"),
            train=at.train,
        )
    ),
)

WAYS = [
    Way(
        place="torchrun",
        shown="torchrun --nnodes=2 --node-rank=N --master-addr=host-a -m samestep train job.yaml",
        starts=lambda at: on_each(lambda rank: torchrun(rank, 2, at.train)),
    ),
    OVER_SSH,
    Way(
        place="hostfile, over SSH",
        shown="samestep train job.yaml --hostfile hosts",
        starts=lambda at: on_first(*python(*at.train, "--hostfile", str(at.hostfile))),
    ),
    Way(
        place="hostfile, over SSH",
        shown="samestep launch --hostfile hosts -- -m samestep train job.yaml",
        starts=lambda at: on_first(*launch("--hostfile", str(at.hostfile), train=at.train), host="host-c"),
        tried="from a third host, which has no rank",
    ),
    WITHOUT_SSH,
    Way(
        place="Slurm",
        shown="srun -N2 -n2 samestep train job.yaml",
        starts=lambda at: on_first("srun", "-N2", "-n2", *python(*at.train)),
        needs="slurm",
        programs=SLURM,
    ),
    Way(
        place="Slurm",
        shown="srun -N2 --ntasks-per-node=1 samestep launch --num-procs 1 -- -m samestep train job.yaml",
        starts=lambda at: on_first("srun", "-N2", "--ntasks-per-node=1", *launch("--num-procs", "1", train=at.train)),
        needs="slurm",
        programs=SLURM,
    ),
    Way(
        place="Slurm",
        shown="sbatch -N2 script.sh, with samestep launch --num-procs 1 -- -m samestep train job.yaml in it",
        starts=_sbatch,
        needs="slurm",
        programs=SLURM,
    ),
    Way(
        place="Open MPI",
        shown="mpirun -np 2 --host host-a:1,host-b:1 samestep train job.yaml",
        starts=lambda at: on_first(*MPIRUN, *python(*at.train)),
        programs=["mpirun"],
    ),
    Way(
        place="Open MPI",
        shown="mpirun -np 2 --host host-a:1,host-b:1 samestep launch --num-procs 1 -- -m samestep train job.yaml",
        starts=lambda at: on_first(*MPIRUN, *launch("--num-procs", "1", train=at.train)),
        programs=["mpirun"],
    ),
    Way(
        place="horovodrun",
        shown="horovodrun -np 2 -H host-a:1,host-b:1 samestep train job.yaml --engine horovod",
        starts=lambda at: on_first(*HOROVODRUN, *python(*at.train, "--engine", "horovod")),
        package="horovod",
    ),
    Way(
        place="Ray",
        shown="samestep launch --ray auto --num-procs 1 -- -m samestep train job.yaml",
        starts=lambda at: on_first(*launch("--ray", "auto", "--num-procs", "1", train=at.train)),
        needs="ray",
        package="ray",
    ),
    Way(
        place="SageMaker's variables",
        shown="samestep launch -- -m samestep train job.yaml",
        starts=lambda at: on_each(lambda _: launch(train=at.train), sagemaker),
    ),
    Way(
        place="PyTorchJob's variables",
        shown="samestep train job.yaml",
        starts=lambda at: on_each(lambda _: python(*at.train), _pod),
    ),
    Way(
        place="PyTorchJob's variables",
        shown="samestep launch -- -m samestep train job.yaml",
        starts=lambda at: on_each(lambda _: launch(train=at.train), _pod),
    ),
]

# In Slurm's batch script and on a far host this path has to lead to the same Python.
assert sys.executable.startswith("/")
