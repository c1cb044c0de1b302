"""The first process of a host: sets its name and mounts, takes in orphans, and ends when its testbed does.

Run by `unshare` in namespaces of its own; it says "ready" when the host is. Its standard input is a pipe from the
testbed's process: the end of it means that this is gone, however it went. When the first process of a PID namespace
ends, the kernel kills all others in it, and with the last of them go the network and the mounts.
"""

import json
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path


def main() -> None:
    settings = json.loads(sys.argv[1])
    folder = Path(settings["folder"])
    socket.sethostname(settings["name"])
    _mount("-t", "tmpfs", "-o", "size=2g", "tmpfs", "/dev/shm")
    _mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", "/run")
    Path("/run/sshd").mkdir()
    # What stands in /sys/class/net is of the network that sysfs was mounted in.
    groups = folder / "cgroup"
    groups.mkdir(exist_ok=True)
    _mount("--rbind", "/sys/fs/cgroup", str(groups))
    _mount("-t", "sysfs", "sysfs", "/sys")
    _mount("--rbind", str(groups), "/sys/fs/cgroup")
    for source, target in settings["binds"].items():
        if Path(target).exists():
            _mount("--bind", source, target)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    _serve()


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


def _serve() -> None:
    """Wait for the testbed's end; meanwhile every process whose parent is gone is a child of this one."""
    wake_up, woken = os.pipe()
    for end in (wake_up, woken):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(woken)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    print("ready", flush=True)
    while True:
        readable, _, _ = select.select([0, wake_up], [], [])
        if wake_up in readable:
            os.read(wake_up, 4096)
            _take_in()
        if 0 in readable and not os.read(0, 4096):
            os._exit(0)


def _take_in() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


if __name__ == "__main__":
    main()
