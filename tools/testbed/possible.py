"""Whether hosts can be made on this machine, and in one line why not."""

import os
import shutil
import subprocess
import sys
from functools import cache

SBIN = ("/usr/sbin", "/sbin", "/usr/local/sbin")
NAMESPACES = ("--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")

_TRIAL = (
    "ip link add br0 type bridge && ip link add one type veth peer name two && ip link set two master br0 "
    "&& mount -t tmpfs tmpfs /dev/shm && mount -t tmpfs tmpfs /run"
)
_PACKAGES = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux", "mount": "mount"}


def program(name: str) -> str | None:
    """The path of a program, also of one that only root's PATH would find."""
    return shutil.which(name, path=os.pathsep.join([*os.get_exec_path(), *SBIN]))


@cache
def why_not(*, ssh: bool = True) -> str | None:
    """Why no hosts can be made here, in one line; None where they can. `ssh`: with a server on each."""
    if sys.platform != "linux":
        return "hosts are made of Linux namespaces, and this is no Linux"
    if os.geteuid() != 0:
        return "hosts are made by root alone"
    needed = {**_PACKAGES, **({"sshd": "openssh-server", "ssh": "openssh-client"} if ssh else {})}
    missing = sorted({package for name, package in needed.items() if program(name) is None})
    if missing:
        return f"{', '.join(missing)} is not installed; run tools/cluster-packages"
    try:
        command = ["unshare", *NAMESPACES, "sh", "-ec", _TRIAL]
        tried = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except subprocess.TimeoutExpired:
        return "the kernel makes no namespaces, bridge and mounts within 20 s"
    if tried.returncode != 0:
        said = tried.stderr.strip().splitlines()
        return f"the kernel refuses namespaces, bridges or mounts: {said[-1] if said else 'no reason given'}"
    return None
