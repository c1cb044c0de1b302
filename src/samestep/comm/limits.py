"""What bounds a collective: copies in a host's memory, and the links between hosts.

Units are bytes a second throughout, of payload: no headers, no framing. The figures bound what collectives can reach;
`measure` says what they do reach.
"""

import socket
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

_SHORTEST_SAMPLE = 1e-3  # seconds: shorter copies are timed several together
_SAMPLES = 7
_PATIENCE = 5.0  # seconds for the connection of a stream
_BLOCK = 1 << 20  # bytes


def copy_rates(sizes: Sequence[int], control: dist.ProcessGroup) -> dict[int, float]:
    """Measure the copy bandwidth of a rank, in bytes a second, while all ranks of its host copy; by size of the copy.

    `control` is a gloo group of all ranks; the slowest rank's bandwidth is returned.
    """
    return {size: _copy_rate(size, control) for size in sizes}


def _copy_rate(size: int, control: dist.ProcessGroup) -> float:
    source = torch.ones(size, dtype=torch.uint8)
    target = torch.zeros(size, dtype=torch.uint8)
    began = time.perf_counter()
    # The first copy maps the target's pages, and tells about how many copies make a sample that can be timed.
    target.copy_(source)
    one = torch.tensor([time.perf_counter() - began])
    # All ranks must make the same number of calls in a sample, or a fast one would copy alone at its end.
    dist.all_reduce(one, dist.ReduceOp.MAX, group=control)
    calls = max(1, min(1000, round(_SHORTEST_SAMPLE / max(one.item(), 1e-7))))
    seconds = torch.zeros(_SAMPLES, dtype=torch.float64)
    for sample in range(_SAMPLES):
        dist.barrier(control)
        began = time.perf_counter()
        for _ in range(calls):
            target.copy_(source)
        seconds[sample] = (time.perf_counter() - began) / calls
    dist.all_reduce(seconds, dist.ReduceOp.MAX, group=control)
    return size / statistics.median(seconds.tolist())


def adapter_rate(interface: str | None, folder: Path = Path("/sys/class/net")) -> float | None:
    """A network adapter's nominal bandwidth in bytes a second, from its driver; None if unknown or virtual."""
    if interface is None or not (folder / interface / "device").exists():
        return None  # virtual adapters report any rate: veth 10 Gbit/s over whatever link
    try:
        megabits = int((folder / interface / "speed").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return megabits * 1e6 / 8 if megabits > 0 else None


def stream_rate(hosts: Sequence[str], address: str, control: dist.ProcessGroup, seconds: float) -> float | None:
    """Measure one TCP connection from another host to rank 0's for `seconds`, in bytes a second.

    `hosts`: the host of each rank. `address`: at which other hosts reach this rank. `control`: a group of all ranks,
    every one of which must call this. None if all ranks are on one host, or no connection was made.
    """
    sender = next((rank for rank, host in enumerate(hosts) if host != hosts[0]), None)
    if sender is None:
        return None
    rank, rate = control.rank(), None
    if rank == 0:
        rate = _receive(address, control)
    else:
        (at,) = _from_rank_0(None, control)
        if rank == sender and at is not None:
            _send(at, seconds)
    (rate,) = _from_rank_0(rate, control)
    return rate


def _from_rank_0(value: object, control: dist.ProcessGroup) -> list:
    """Broadcast a value from rank 0, as a list of one item."""
    values = [value]
    dist.broadcast_object_list(values, group_src=0, group=control)
    return values


def _receive(address: str, control: dist.ProcessGroup) -> float | None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        listening = socket.create_server((address, 0), family=family)
    except OSError:
        _from_rank_0(None, control)
        return None
    with listening:
        listening.settimeout(_PATIENCE)
        _from_rank_0(listening.getsockname()[:2], control)
        try:
            connection, _ = listening.accept()
            with connection:
                connection.settimeout(_PATIENCE)
                return _count(connection)
        except OSError:
            return None


def _count(connection: socket.socket) -> float | None:
    """Bytes a second from the first byte to the last."""
    block = bytearray(_BLOCK)
    received, began, ended = 0, None, 0.0
    while count := connection.recv_into(block):
        ended = time.perf_counter()
        if began is None:
            began = ended  # the first block arrived before the clock started
        else:
            received += count
    return received / (ended - began) if began is not None and ended > began else None


def _send(at: tuple[str, int], seconds: float) -> None:
    block = bytes(_BLOCK)
    try:
        with socket.create_connection(at, timeout=_PATIENCE) as connection:
            until = time.perf_counter() + seconds
            while time.perf_counter() < until:
                connection.sendall(block)
    except OSError:
        return  # the receiver tells that nothing came
