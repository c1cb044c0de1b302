"""Measure and show collectives: in ranks of our own, or as one of those that a launcher has started."""

import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist

from samestep import environment
from samestep.comm import limits
from samestep.comm.collectives import COLLECTIVES
from samestep.comm.correctness import DTYPES, WRONG, agreed, attempt, short
from samestep.comm.demo import Demonstration, demonstrate
from samestep.comm.measure import DTYPE, Channel, CollectiveTiming, fits, measure
from samestep.comm.mesh import new_group
from samestep.comm.transports import TABLE, TransportContext, available, default, title_of
from samestep.comm_bench.request import AUTO, CommRequest, in_words
from samestep.comm_bench.results import BandwidthLimits, Check, Report
from samestep.comparison.results import machine
from samestep.errors import UserError
from samestep.launch import local
from samestep.launch.device import backend_of
from samestep.launch.network import agreed_in_group, interface_of
from samestep.launch.world import World, join
from samestep.progress import phases
from samestep.ranks import DeviceChoice

_STREAM_SECONDS = 1.0  # that the link between hosts is filled


def measured(request: CommRequest, processes: int) -> Report | None:
    """Check the results of every requested collective, then time them; None except on rank 0.

    Raises UserError and RankFailedError as `samestep.launch.local.start` does.
    """
    return on_ranks(_measure_rank, processes, request)


def demonstrated(
    names: Sequence[str], device: DeviceChoice, processes: int, transport: str
) -> list[Demonstration] | None:
    """Run collectives on small numbers through a transport; None except on rank 0.

    `transport`: its name, or auto for the one that a job gets here. Raises UserError for one that is unavailable.
    """
    return on_ranks(_demonstrate_rank, processes, tuple(names), device, transport)


def on_ranks(function: Callable[..., Any], processes: int, *arguments: Any) -> Any:
    """Call a function in every rank: here where this process is one of them."""
    if environment.ranks() is not None:
        return function(*arguments)
    return local.start(function, arguments, processes)


@dataclass(frozen=True, kw_only=True)
class JoinedRanks:
    """The joined ranks: their world, a control group, and their hosts."""

    world: World
    control: dist.ProcessGroup  # gloo, all ranks: to agree on outcomes and gather results
    place: TransportContext


@contextmanager
def meet(device: DeviceChoice) -> Iterator[JoinedRanks]:
    """Join the process group, and gather the ranks' host names."""
    with phases.running("comm: ranks"), join(device=device) as world:
        control = new_group(range(world.world_size), backend="gloo")
        hosts = [""] * world.world_size
        dist.all_gather_object(hosts, socket.gethostname(), group=control)
        backend = backend_of(world.device).rpartition(":")[2]
        place = TransportContext(hosts=tuple(hosts), device=world.device, backend=backend)
        yield JoinedRanks(world=world, control=control, place=place)


def _channels(place: TransportContext) -> tuple[list[Channel], dict[str, str]]:
    """Open a channel for each available transport. Returns them, and why the others are unavailable."""
    channels: list[Channel] = []
    missing: dict[str, str] = {}
    for name, transport in TABLE.items():
        if (why := transport.missing(place)) is None:
            channel = _channel(name, place)
            why = transport.fallen_back(channel.group)
            if why is None:
                channels.append(channel)
        if why is not None:
            missing[name] = why
    return channels, missing


def _channel(name: str, place: TransportContext) -> Channel:
    return Channel(
        transport=title_of(name, place), group=TABLE[name].group(place), device=TABLE[name].devices(place)[0]
    )


def _demonstrate_rank(names: Sequence[str], device: DeviceChoice, transport: str) -> list[Demonstration] | None:
    """Run the demonstrations on one rank; the results on rank 0, None on the others."""
    with meet(device) as met:
        chosen = default(met.place) if transport == AUTO else transport
        if (reason := TABLE[chosen].missing(met.place)) is not None:
            raise UserError(f"--transport {chosen}: {reason}; use {' or '.join(available(met.place))}")
        channel = _channel(chosen, met.place)
        shown = [demonstrate(name, channel, met.control) for name in names]
        return (
            [demonstration for demonstration in shown if demonstration is not None] if met.world.rank == 0 else None
        )


def _measure_rank(request: CommRequest) -> Report | None:
    """Check, time and find limits on one rank; the report on rank 0, None on the others."""
    with meet(request.device) as met:
        say = _say if met.world.rank == 0 else lambda text: None
        channels, missing = _channels(met.place)
        checks = _checks(request, channels, met.control, say)
        refused = {(check.transport, check.collective) for check in checks if _stops(check)}
        rows: list[CollectiveTiming] = []
        for name in request.collectives:
            usable = [channel for channel in channels if (channel.transport, name) not in refused]
            rows += _timed(name, request, usable, met.control, say)
        bandwidths = _limits(request, met, say)
        if met.world.rank != 0:
            return None
        return Report(
            hosts=met.place.hosts,
            transports=tuple(channel.transport for channel in channels),
            missing=missing,
            checks=checks,
            rows=rows,
            fits=fits(rows),
            limits=bandwidths,
            host={"name": socket.gethostname(), **machine()},
        )


def _stops(check: Check) -> bool:
    """Whether a failed check excludes a collective from timing: it failed with the dtype that is timed."""
    return check.dtype == short(DTYPE) and check.reason is not None


def _checks(
    request: CommRequest, channels: Sequence[Channel], control: dist.ProcessGroup, say: Callable[[str], None]
) -> list[Check]:
    """Check every collective with every dtype on small messages."""
    checks = []
    for channel in channels:
        for name in request.collectives:
            for dtype in DTYPES if COLLECTIVES[name].gives != "none" else [DTYPE]:
                with phases.status(partial("checking {} over {}".format, name, channel.transport)):
                    reason = agreed(attempt(COLLECTIVES[name], channel.group, dtype, channel.device), control)
                named = {"transport": channel.transport, "collective": name, "dtype": short(dtype)}
                checks.append(Check(**named, reason=reason, wrong=reason is not None and WRONG in reason))
        own_checks = [check for check in checks if check.transport == channel.transport]
        right, wrong = sum(check.reason is None for check in own_checks), sum(check.wrong for check in own_checks)
        say(f"{channel.transport}: results: {right} right, {wrong} wrong, {len(own_checks) - right - wrong} refused")
    return checks


def _timed(
    name: str,
    request: CommRequest,
    channels: Sequence[Channel],
    control: dist.ProcessGroup,
    say: Callable[[str], None],
) -> list[CollectiveTiming]:
    """Time a collective through all channels, at each size; one that sends nothing is timed once."""
    if not channels:
        return []
    began = time.perf_counter()
    sizes = request.sizes if COLLECTIVES[name].gives != "none" else request.sizes[:1]
    with phases.status(lambda: f"timing {name}"):
        rows = [row for size in sizes for row in measure(name, size, channels, control, request.seconds)]
    of_sizes = f" of {in_words(sizes)}" if COLLECTIVES[name].gives != "none" else ""
    say(f"{name}{of_sizes}: {time.perf_counter() - began:.1f} s")
    return rows


def _limits(request: CommRequest, met: JoinedRanks, say: Callable[[str], None]) -> BandwidthLimits:
    """What bounds the bandwidth here: copies in memory, and between hosts the link."""
    copies = limits.copy_rates(request.sizes, met.control)
    if met.place.one_host:
        return BandwidthLimits(copies=copies)
    say("the link between hosts")
    address = agreed_in_group(environment.main_address())
    interface = interface_of(address)
    stream = limits.stream_rate(met.place.hosts, address, met.control, _STREAM_SECONDS)
    return BandwidthLimits(copies=copies, interface=interface, adapter=limits.adapter_rate(interface), stream=stream)


def _say(text: str) -> None:
    """A line of progress, also on a terminal."""
    phases.heard()
    print(f"samestep: {text}", file=sys.stderr, flush=True)
