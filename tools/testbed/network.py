"""The network of a testbed: a bridge a rack, links to hosts and between racks, pulled, slowed down or put back.

Each bridge stands in a network namespace without a name, which lives as long as a process in it. Nothing is seen in
the machine's own network, and no address can collide with one there or in another testbed.
"""

import subprocess
from collections.abc import Sequence

NETWORK = "10.82.0"
FIRST = 10  # the last number of the first host's address


# cat waits for the end of its standard input, a pipe that closes when the testbed's process is gone.
_BRIDGE = "ip link add br0 type bridge && ip link set br0 up && echo up && exec cat"


class Switch:
    """A bridge, held by a process that ends with the testbed's."""

    def __init__(self) -> None:
        self._holder = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", _BRIDGE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._holder.stdout is not None
        if self._holder.stdout.readline().strip() != "up":
            raise RuntimeError(f"a bridge could not be made; unshare ended with {self._holder.wait(5)}")

    @property
    def pid(self) -> int:
        return self._holder.pid

    def connect_host(self, pid: int, port: str, address: str) -> None:
        """Lay a cable from this bridge's `port` to eth0 of the host whose first process is `pid`."""
        ip(None, f"link add eth0 netns {pid} type veth peer name {port} netns {self.pid}")
        ip(self.pid, f"link set {port} master br0 up")
        # The same hardware address at each boot, since the others remember it.
        number = int(address.rpartition(".")[2])
        ip(pid, f"link set eth0 address 02:00:00:00:00:{number:02x}")
        ip(pid, f"address add {address}/24 dev eth0", "link set eth0 up")

    def disconnect(self, port: str) -> None:
        """Take a cable away, if it is still there."""
        _inside(self.pid, ["ip", "link", "delete", port], check=False)

    def connect_switch(self, other: "Switch", port: str) -> None:
        """Lay a cable to another bridge; it has the name `port` at both ends."""
        ip(None, f"link add {port} netns {self.pid} type veth peer name {port} netns {other.pid}")
        for end in (self, other):
            ip(end.pid, f"link set {port} master br0 up")

    def set_port(self, port: str, state: str) -> None:
        """Make a port of this bridge "up" or "down"."""
        ip(self.pid, f"link set {port} {state}")

    def close(self) -> None:
        self._holder.kill()
        self._holder.communicate()


def limit_rate(pid: int, device: str, rate: str | None) -> None:
    """Let a device send no more than `rate`, such as "100mbit"; None: as fast as it can."""
    if rate is None:
        _inside(pid, ["tc", "qdisc", "del", "dev", device, "root"], check=False)
        return
    limit = ["rate", rate, "burst", "256kb", "latency", "50ms"]
    _inside(pid, ["tc", "qdisc", "replace", "dev", device, "root", "tbf", *limit])


def ip(pid: int | None, *lines: str) -> None:
    """Commands of `ip` in the network of a process; None: in this process's own."""
    command = ["ip", "-batch", "-"]
    _inside(pid, command, lines="\n".join(lines) + "\n")


def _inside(pid: int | None, command: Sequence[str], *, lines: str | None = None, check: bool = True) -> str:
    where = [] if pid is None else ["nsenter", "--target", str(pid), "--net"]
    done = subprocess.run([*where, *command], input=lines, capture_output=True, text=True, timeout=20, check=False)
    if check and done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} {(lines or '').strip()!r} failed: {done.stderr.strip()}")
    return done.stdout
