"""A cable between two bridges with a rate, a delay and losses: a program that carries each frame from end to end.

The kernel's own way (netem) isn't built into every kernel. Each end is a TAP device, which hands its frames to the
program in the form in which the kernel passes them on between network cards: up to 64 KiB at once, so that Python
keeps up with some hundred Mbit/s.

    python cable.py PID PORT PID PORT DELAY_MS LOSS RATE_MBIT
"""

import ctypes
import fcntl
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from testbed.network import Switch

_NEW_NETWORK = 0x40000000  # CLONE_NEWNET of sched.h
# From linux/if_tun.h.
_SET_INTERFACE, _SET_OFFLOAD = 0x400454CA, 0x400454D0
_TAP, _NO_PACKET_INFORMATION, _WITH_HEADER = 0x0002, 0x1000, 0x4000
_CHECKSUMS_AND_LARGE_FRAMES = 0x01 | 0x02 | 0x04
_HEADER = 10  # bytes of virtio_net_hdr before each frame
_LARGEST = 70_000
_SEGMENT, _FRAMING = 1500, 24  # bytes of a frame on a real cable, and what a real cable adds to it
_QUEUE = 0.05  # seconds that a frame may wait for the ones before it; later ones are lost


@dataclass(frozen=True, kw_only=True)
class Cable:
    """What lies between two racks."""

    delay_ms: float = 0.0  # each way
    loss: float = 0.0  # which part of the frames
    rate_mbit: float = 0.0  # 0: as fast as it can


class Joint:
    """Two bridges joined by a cable, for as long as the testbed's process is there."""

    def __init__(self, one: "Switch", other: "Switch", port: str, cable: Cable) -> None:
        ends = [str(one.pid), port, str(other.pid), port]
        numbers = [str(number) for number in (cable.delay_ms, cable.loss, cable.rate_mbit)]
        self._carrier = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, *ends, *numbers],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._carrier.stdout is not None
        if self._carrier.stdout.readline().strip() != "up":
            raise RuntimeError(f"a cable could not be laid; it ended with {self._carrier.wait(5)}")

    def close(self) -> None:
        self._carrier.kill()
        self._carrier.communicate()


def _tap(pid: int, port: str) -> int:
    """A TAP device at the bridge of a process's network; this process is in that network afterwards."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path(f"/proc/{pid}/ns/net").open("rb") as network:
        if libc.setns(network.fileno(), _NEW_NETWORK) != 0:
            raise OSError(ctypes.get_errno(), "setns")
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    flags = _TAP | _NO_PACKET_INFORMATION | _WITH_HEADER
    fcntl.ioctl(tap, _SET_INTERFACE, struct.pack("16sH22x", port.encode(), flags))
    fcntl.ioctl(tap, _SET_OFFLOAD, _CHECKSUMS_AND_LARGE_FRAMES)
    subprocess.run(["ip", "link", "set", port, "master", "br0", "up"], check=True)
    return tap


class _Way:
    """Frames from one end to the other."""

    def __init__(self, source: int, target: int, cable: Cable, seed: int) -> None:
        self.source, self._target, self._cable = source, target, cable
        self._under_way: deque[tuple[float, bytes]] = deque()  # when each arrives
        self._free = 0.0  # when the frames before have left
        self._chance = random.Random(seed)

    @property
    def next_arrival(self) -> float | None:
        return self._under_way[0][0] if self._under_way else None

    def take(self, now: float) -> None:
        """Take the frames that wait at the source."""
        for _ in range(16):
            try:
                frame = os.read(self.source, _LARGEST)
            except BlockingIOError:
                return
            leaves = max(now, self._free)
            if self._chance.random() < self._cable.loss or leaves - now > _QUEUE:
                continue
            if self._cable.rate_mbit:
                size = len(frame) - _HEADER
                size += _FRAMING * max(1, -(-size // _SEGMENT))
                leaves += size * 8 / (self._cable.rate_mbit * 1e6)
            self._free = leaves
            self._under_way.append((leaves + self._cable.delay_ms / 1e3, frame))

    def deliver(self, now: float) -> None:
        """Hand over the frames that have arrived."""
        while self._under_way and self._under_way[0][0] <= now:
            try:
                os.write(self._target, self._under_way.popleft()[1])
            except OSError:
                continue  # the other end's queue is full: a lost frame


def carry(ends: list[tuple[int, str]], cable: Cable) -> None:
    """Carry frames until the standard input ends."""
    taps = [_tap(pid, port) for pid, port in ends]
    ways = [_Way(taps[0], taps[1], cable, 1), _Way(taps[1], taps[0], cable, 2)]
    print("up", flush=True)
    while True:
        now = time.monotonic()
        for way in ways:
            way.deliver(now)
        arrivals = [way.next_arrival for way in ways if way.next_arrival is not None]
        wait = max(0.0, min(arrivals) - time.monotonic()) if arrivals else None
        readable, _, _ = select.select([0, *taps], [], [], wait)
        if 0 in readable:
            return
        for way in ways:
            if way.source in readable:
                way.take(time.monotonic())


if __name__ == "__main__":
    one, one_port, other, other_port, delay, loss, rate = sys.argv[1:]
    carry(
        [(int(one), one_port), (int(other), other_port)],
        Cable(delay_ms=float(delay), loss=float(loss), rate_mbit=float(rate)),
    )
