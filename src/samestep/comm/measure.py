"""Measure the time of collectives, over message sizes and transports.

A sample is the time of a few consecutive calls after a barrier, on the slowest rank, divided by the number of calls
(as nccl-tests times its iterations). The transports take turns sample by sample, so that other load on the machine
affects all of them equally. The numbers of calls and samples follow from the time of a first call and a budget in
seconds; all ranks agree on them.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from samestep.comm.collectives import COLLECTIVES, Buffers, algorithm_bandwidth, chunk_of

DTYPE = torch.float32  # of the messages that are timed

_SHORTEST_SAMPLE = 1e-3  # seconds: shorter calls are timed several together
_MOST_CALLS = 200
_SAMPLES = (5, 50)  # fewest and most
_FEWEST_OF_LONG = 3  # where a call takes a second or more
_LONG = 1.0


@dataclass(frozen=True, kw_only=True)
class Channel:
    """An open transport: a group of all ranks, and the device of the tensors that are sent."""

    transport: str  # as tables call it
    group: dist.ProcessGroup
    device: torch.device


@dataclass(frozen=True, kw_only=True)
class CollectiveTiming:
    """The measurement of one collective at one message size through one transport."""

    collective: str
    bytes: int  # S of nccl-tests: of all chunks of a message; 0 for a barrier
    ranks: int
    transport: str
    device: str
    seconds_median: float
    seconds_p10: float
    seconds_p90: float
    samples: int
    calls: int  # of one sample

    @property
    def algorithm_bandwidth(self) -> float | None:
        """Bytes a second; None where nothing is sent."""
        return algorithm_bandwidth(self.bytes, self.seconds_median) if self.bytes else None

    @property
    def bus_bandwidth(self) -> float | None:
        """Bytes a second that one link would have to carry, by nccl-tests; None where nothing is sent."""
        rate = self.algorithm_bandwidth
        return None if rate is None else rate * COLLECTIVES[self.collective].bus_factor(self.ranks)

    def to_json(self) -> dict[str, Any]:
        """Seconds, bytes, and bytes a second."""
        return {
            "collective": self.collective,
            "bytes": self.bytes,
            "ranks": self.ranks,
            "transport": self.transport,
            "device": self.device,
            "seconds_median": self.seconds_median,
            "seconds_p10": self.seconds_p10,
            "seconds_p90": self.seconds_p90,
            "algorithm_bandwidth": self.algorithm_bandwidth,
            "bus_bandwidth": self.bus_bandwidth,
            "samples": self.samples,
            "calls": self.calls,
        }


def measure(
    name: str, size: int, channels: Sequence[Channel], control: dist.ProcessGroup, budget: float
) -> list[CollectiveTiming]:
    """Time a collective with messages of `size` bytes through each channel, for about `budget` seconds each.

    `control` is a gloo group of all ranks, on which they agree. Every rank gets the same rows. A size that does not
    divide into n chunks is rounded down, as in nccl-tests; a barrier has no size.
    """
    collective, n = COLLECTIVES[name], control.size()
    chunk = chunk_of(size, n, DTYPE.itemsize)
    sent = chunk * n * DTYPE.itemsize if collective.gives != "none" else 0
    of_device: dict[torch.device, Buffers] = {}
    for channel in channels:
        if channel.device not in of_device:
            of_device[channel.device] = collective.buffers(
                chunk, n, control.rank(), dtype=DTYPE, device=channel.device
            )
    calls = [
        _Call(lambda channel=channel: collective.run(channel.group, of_device[channel.device]), channel.device)
        for channel in channels
    ]
    plans = [_plan(call, control, budget) for call in calls]
    seconds: list[list[float]] = [[] for _ in calls]
    for number in range(max(plan.samples for plan in plans)):
        for call, plan, of_call in zip(calls, plans, seconds, strict=True):
            if number < plan.samples:
                dist.barrier(control)
                of_call.append(call.seconds(plan.calls) / plan.calls)
    return [
        _row(name, sent, n, channel, plan, _slowest(of_channel, control))
        for channel, plan, of_channel in zip(channels, plans, seconds, strict=True)
    ]


@dataclass(frozen=True)
class _Call:
    run: Callable[[], None]
    device: torch.device

    def seconds(self, calls: int) -> float:
        """Time consecutive calls, in seconds, until the device has finished them."""
        began = time.perf_counter()
        for _ in range(calls):
            self.run()
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return time.perf_counter() - began


@dataclass(frozen=True, kw_only=True)
class _Plan:
    calls: int  # of a sample
    samples: int


def _plan(call: _Call, control: dist.ProcessGroup, budget: float) -> _Plan:
    """Warm up, and choose the numbers of calls and samples; the same on every rank."""
    call.seconds(1)  # connections are made and memory is pinned at the first
    dist.barrier(control)
    one = max(_slowest([call.seconds(1)], control)[0], 1e-7)
    if one < _SHORTEST_SAMPLE:  # a single short call says little
        one = max(_slowest([call.seconds(5) / 5], control)[0], 1e-7)
    calls = min(_MOST_CALLS, max(1, math.ceil(_SHORTEST_SAMPLE / one)))
    fewest, most = _FEWEST_OF_LONG if one >= _LONG else _SAMPLES[0], _SAMPLES[1]
    return _Plan(calls=calls, samples=min(most, max(fewest, int(budget / (calls * one)))))


def _slowest(seconds: Sequence[float], control: dist.ProcessGroup) -> list[float]:
    """The maximum of each sample's time over the ranks."""
    slowest = torch.tensor(list(seconds), dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=control)
    return slowest.tolist()


def _row(name: str, sent: int, n: int, channel: Channel, plan: _Plan, seconds: Sequence[float]) -> CollectiveTiming:
    p10, median, p90 = np.percentile(seconds, [10, 50, 90]).tolist()
    return CollectiveTiming(
        collective=name,
        bytes=sent,
        ranks=n,
        transport=channel.transport,
        device=channel.device.type,
        seconds_median=median,
        seconds_p10=p10,
        seconds_p90=p90,
        samples=plan.samples,
        calls=plan.calls,
    )


@dataclass(frozen=True, kw_only=True)
class Fit:
    """t = latency + bytes / bandwidth: Hockney's model (Hockney 1994, "The communication challenge for MPP")."""

    collective: str
    transport: str
    ranks: int
    latency: float  # seconds
    bandwidth: float | None  # bytes a second, of the algorithm; None where the time does not grow with the bytes
    worst: float  # largest relative difference of a median from the model

    def seconds(self, size: float) -> float:
        return self.latency + (size / self.bandwidth if self.bandwidth else 0.0)

    def to_json(self) -> dict[str, Any]:
        """Latency in seconds and bandwidth in bytes a second of the straight line through the measurements."""
        return {
            "collective": self.collective,
            "transport": self.transport,
            "ranks": self.ranks,
            "latency_seconds": self.latency,
            "bytes_per_second": self.bandwidth,
            "worst_relative_difference": self.worst,
        }


def fits(rows: Sequence[CollectiveTiming]) -> list[Fit]:
    """A model for each collective and transport that was measured at two sizes or more."""
    curves: dict[tuple[str, str, int], list[CollectiveTiming]] = {}
    for row in rows:
        if row.bytes:
            curves.setdefault((row.collective, row.transport, row.ranks), []).append(row)
    fits = []
    for (collective, transport, ranks), of_curve in curves.items():
        points = {row.bytes: row.seconds_median for row in of_curve}
        if len(points) > 1:
            latency, bandwidth, worst = fit(points)
            named = {"collective": collective, "transport": transport, "ranks": ranks}
            fits.append(Fit(**named, latency=latency, bandwidth=bandwidth, worst=worst))
    return fits


def fit(points: Mapping[int, float]) -> tuple[float, float | None, float]:
    """Latency, bandwidth and worst relative difference for seconds by bytes, at two sizes or more.

    Least squares of relative differences, so that the shortest message counts as much as the longest:
    the sum of ((latency + bytes / bandwidth - t) / t)^2 is least. Neither part is negative.
    """
    sizes, seconds = np.array(list(points), dtype=float), np.array(list(points.values()))
    columns = np.stack([1 / seconds, sizes / seconds], axis=1)  # [sizes, 2]: of latency, of seconds a byte
    scale = np.linalg.norm(columns, axis=0)  # their magnitudes are nine orders apart
    candidates = [
        np.linalg.lstsq(columns / scale, np.ones(len(sizes)), rcond=None)[0] / scale,
        np.array([columns[:, 0].sum() / (columns[:, 0] ** 2).sum(), 0.0]),
        np.array([0.0, columns[:, 1].sum() / (columns[:, 1] ** 2).sum()]),
    ]
    allowed = [candidate for candidate in candidates if (candidate >= 0).all()]
    best = min(allowed, key=lambda candidate: float(((columns @ candidate - 1) ** 2).sum()))
    latency, slope = best.tolist()
    return latency, (1 / slope if slope > 0 else None), float(np.abs(columns @ best - 1).max())
