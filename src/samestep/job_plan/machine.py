"""The machine that a job is planned for: this one, whose cores are measured, or devices of a data sheet."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from samestep.errors import UserError
from samestep.launch.affinity import cores
from samestep.launch.memory import available_memory
from samestep.planning.hardware import Cluster
from samestep.training.step_work import CountedWork

CAUSES: Sequence[str] = ("products", "passes", "operators", "messages", "bytes sent")

# Without `samestep comm --json` or --measure: a message through shared memory between two ranks of this machine
# (docs/communication.md), for want of a measurement.
_MESSAGE_SECONDS, _BYTE_SECONDS = 1e-4, 1 / 2e9
_SECONDS = 0.25  # of each measurement
_SIDE, _PASS_ELEMENTS = 512, 1 << 20
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Seconds of each unit of work on one thread, and of messages between ranks of this machine."""

    flop: float
    byte: float  # read or written by what is no product
    operator: float  # to issue one, with autograd's part of it
    message: float
    byte_sent: float
    speedup: Mapping[int, float] = field(default_factory=lambda: {1: 1.0})  # of products, by threads
    source: str = "measured"

    def corrected(self, factors: Mapping[str, float]) -> "Rates":
        """The rates, each multiplied by the factor of its cause."""
        names: Mapping[str, str] = dict(
            zip(CAUSES, ("flop", "byte", "operator", "message", "byte_sent"), strict=True)
        )
        changed = {names[cause]: getattr(self, names[cause]) * factor for cause, factor in factors.items()}
        return replace(self, **changed, source="corrected by measured steps")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Where ranks run: cores of this host, or the devices of a cluster."""

    name: str
    devices: int
    memory: float  # bytes of a device; of all ranks together on CPUs
    rates: Rates | None = None
    cores: int = 0  # that CPU ranks share
    cluster: Cluster | None = None

    def __post_init__(self) -> None:
        if self.devices < 1:
            raise UserError(f"--devices is {self.devices}; use 1 or more")


def this_machine(devices: int | None, precision: str, comm: Path | None = None) -> Machine:
    """The cores that this process may run on, measured in about a second."""
    rates = measured_rates(precision)
    if comm is not None:
        rates = replace(rates, **message_rates(comm))
    number = cores()
    return Machine(
        name="this machine",
        devices=number if devices is None else devices,
        memory=float(available_memory() or 0) or float("inf"),
        rates=rates,
        cores=number,
    )


def devices_of(cluster: Cluster) -> Machine:
    """Devices of a data sheet, of which 94 % of the memory is taken to be usable."""
    device = cluster.device
    return Machine(name=device.name, devices=cluster.devices, memory=0.94 * device.memory, cluster=cluster)


def measured_rates(precision: str) -> Rates:
    """Rates of one thread, and what more threads give products; the number of threads is as before afterwards."""
    before = torch.get_num_threads()
    try:
        by_threads: dict[int, float] = {}
        for threads in dict.fromkeys((1, cores())):
            torch.set_num_threads(threads)
            by_threads[threads] = _product_seconds(_DTYPES.get(precision, torch.float32))
        torch.set_num_threads(1)
        one = by_threads[1]
        byte = _pass_seconds()
        return Rates(
            flop=one,
            byte=byte,
            operator=_operator_seconds(one, byte),
            message=_MESSAGE_SECONDS,
            byte_sent=_BYTE_SECONDS,
            speedup={threads: one / seconds for threads, seconds in by_threads.items()},
        )
    finally:
        torch.set_num_threads(before)


def message_rates(file: Path) -> dict[str, float]:
    """Latency and seconds a byte of an all-reduce, from what `samestep comm --json` wrote."""
    try:
        told = json.loads(file.read_text(encoding="utf-8"))
        fits = [fit for fit in told["fits"] if fit["collective"] == "all-reduce" and fit["bytes_per_second"]]
        best = min(fits, key=lambda fit: 1 / fit["bytes_per_second"])
        ranks, rate = best["ranks"], best["bytes_per_second"]
        # A ring sends 2 (n - 1) / n of the message.
        return {"message": best["latency_seconds"], "byte_sent": ranks / (2 * (ranks - 1)) / rate}
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise UserError(
            f"--comm {file}: no all-reduce measured at two sizes is told there ({type(error).__name__}); "
            "write it by samestep comm --json FILE"
        ) from None


def _repeated(run: Callable[[], object]) -> float:
    """Seconds of the fastest call: others are those in which other programs had the cores."""
    run()
    fastest, until = float("inf"), time.perf_counter() + _SECONDS
    while (began := time.perf_counter()) < until:
        run()
        fastest = min(fastest, time.perf_counter() - began)
    return fastest


def _product_seconds(dtype: torch.dtype) -> float:
    one, other = (torch.randn(_SIDE, _SIDE).to(dtype) for _ in range(2))
    return _repeated(lambda: one @ other) / (2 * _SIDE**3)


def _pass_seconds() -> float:
    one, result = torch.randn(_PASS_ELEMENTS), torch.empty(_PASS_ELEMENTS)
    return _repeated(lambda: torch.add(one, 1.0, out=result)) / (2 * one.nbytes)


def _operator_seconds(flop: float, byte: float) -> float:
    """What forward, backward and update of a tiny model take for each operator, beside its work."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU()) for _ in range(8)))
    given = torch.randn(4, 8)

    def step() -> None:
        model(given).sum().backward()

    counted = CountedWork()
    with counted:
        step()
    work = counted.found()
    return max(_repeated(step) - work.flops * flop - work.bytes * byte, 0.0) / work.operators
