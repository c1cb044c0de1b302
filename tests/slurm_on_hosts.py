"""A Slurm on the hosts of a testbed: Debian's, with its controller on the first host and a node on each."""

import os
import time
from collections.abc import Sequence
from pathlib import Path

from testbed import Host
from testbed.possible import program

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch")
SETTINGS = "/etc/slurm"

_SLURM = """
ClusterName=testbed
SlurmctldHost={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile={folder}/controller.log
SlurmdLogFile={folder}/node-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
SlurmdTimeout=30
SwitchType=switch/none
SlurmdParameters=config_overrides
NodeName={nodes} CPUs={cpus} RealMemory=1000
PartitionName=main Nodes={nodes} Default=YES MaxTime=10 State=UP OverSubscribe=FORCE:4
"""


def settings(folder: Path, names: Sequence[str], cpus: int = 2) -> Path:
    """Write slurm.conf and munge's key into a folder, which is to be seen as /etc/slurm on every host."""
    folder.mkdir(parents=True)
    folder.chmod(0o755)
    (folder / "state").mkdir()
    text = _SLURM.format(controller=names[0], nodes=",".join(names), folder=folder, cpus=cpus)
    (folder / "slurm.conf").write_text(text.lstrip())
    key = folder / "munge.key"
    key.touch(mode=0o400)
    key.write_bytes(os.urandom(1024))
    return folder


def start(hosts: Sequence[Host], folder: Path) -> None:
    """Start Slurm on hosts that see `folder` as /etc/slurm, and wait until its nodes are idle."""
    for host in hosts:
        munge = folder / f"munge-{host.name}"
        host.run(["mkdir", "--mode=755", "/run/munge"])
        files = [f"--key-file={folder}/munge.key", "--socket=/run/munge/munge.socket.2", "--pid-file=/run/munge.pid"]
        files += [f"--log-file={munge}.log", f"--seed-file={munge}.seed"]
        host.run([_path("munged"), "--force", "--num-threads=2", *files], timeout=20)
    hosts[0].run([_path("slurmctld")], timeout=20)
    for host in hosts:
        host.run([_path("slurmd"), "-N", host.name], timeout=20)
    until = time.monotonic() + 30
    wanted = f"idle {len(hosts)}"
    while (told := hosts[0].run(["sinfo", "-h", "-o", "%t %D"], check=False).stdout.strip()) != wanted:
        if time.monotonic() > until:
            logs = "\n".join(log.read_text() for log in folder.glob("*.log"))
            raise TimeoutError(f"sinfo says {told!r} after 30 s, and not {wanted!r}\n{logs}")
        time.sleep(0.1)


def _path(name: str) -> str:
    found = program(name)
    assert found is not None
    return found
