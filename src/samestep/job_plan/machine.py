"""The machine that a job is planned for: this one, whose cores are measured, or devices of a data sheet."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from samestep import environment
from samestep.errors import UserError
from samestep.launch.affinity import cores
from samestep.launch.memory import available_memory, give_back_freed_memory, keep_freed_memory
from samestep.planning.hardware import Cluster
from samestep.training.step_work import CountedWork, StepWork

COMPUTE: Sequence[str] = ("products", "attention", "passes", "operators")  # what a rank does by itself
CAUSES: Sequence[str] = (*COMPUTE, "messages", "bytes sent")

# Without `samestep comm --json` or --measure: a message through shared memory between two ranks of this machine
# (docs/communication.md), for want of a measurement.
_MESSAGE_SECONDS, _BYTE_SECONDS = 1e-4, 1 / 2e9
_SECONDS = 0.2  # of each measurement
_ROWS, _LAYERS = 2048, 6  # tokens, and linear layers one after the other, whose products are measured
_WIDE, _NARROW = 512, 128  # columns of the layers: large products, and such as are bound by reading and writing
_HEADS = (4, 4, 256, 64)  # samples, heads, tokens and columns of the attention that is measured
_PASSES = (2048, 512)  # rows and columns of the tensors that passes go over: 4 MiB, as activations have
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Seconds of each unit of work on one thread, and of messages between ranks of this machine."""

    flop: float  # of products and convolutions
    product_element: float = 0.0  # a number that a product reads or writes: more than the rest where a side is small
    attention_flop: float = 0.0  # in attention's kernels
    byte: float  # read or written by what is no product
    operator: float  # to issue one, with autograd's part of it
    message: float
    byte_sent: float
    speedup: Mapping[int, float] = field(default_factory=lambda: {1: 1.0})  # of work, by threads
    source: str = "measured"

    def corrected(self, factors: Mapping[str, float]) -> "Rates":
        """The rates, each multiplied by the factor of its cause."""
        changed = {name: getattr(self, name) * factors[cause] for cause in factors for name in _RATES[cause]}
        return replace(self, **changed, source="corrected by measured steps")

    def computing(self, work: StepWork, threads: int) -> dict[str, float]:
        """Seconds that a rank computes by itself, by cause."""
        speedup = self.speedup.get(threads) or max(
            (each for number, each in self.speedup.items() if number <= threads), default=1.0
        )
        seconds = (
            (work.product_flops + work.other_flops) * self.flop + work.product_elements * self.product_element,
            work.attention_flops * (self.attention_flop or self.flop),
            work.bytes * self.byte,
            work.operators * self.operator * speedup,  # issued by one thread
        )
        return {cause: each / speedup for cause, each in zip(COMPUTE, seconds, strict=True)}

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


_RATES: Mapping[str, Sequence[str]] = {
    "products": ("flop", "product_element"), "attention": ("attention_flop",), "passes": ("byte",),
    "operators": ("operator",), "messages": ("message",), "bytes sent": ("byte_sent",),
}  # fmt: skip


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
    """Rates of one thread, and what more threads give; the number of threads is as before afterwards.

    Memory is kept between calls, as ranks do.
    """
    before, kept = torch.get_num_threads(), keep_freed_memory(environment.snapshot())
    try:
        dtype = _DTYPES.get(precision, torch.float32)
        by_threads: dict[int, tuple[float, StepWork]] = {}
        for threads in dict.fromkeys((1, cores())):
            torch.set_num_threads(threads)
            by_threads[threads] = _products(_WIDE, dtype)
        torch.set_num_threads(1)
        wide, narrow = by_threads[1], _products(_NARROW, dtype)
        flop, element = _of_products([wide, narrow])
        rates = Rates(
            flop=flop,
            product_element=element,
            attention_flop=_attention_seconds(dtype),
            byte=0.0,
            operator=0.0,
            message=_MESSAGE_SECONDS,
            byte_sent=_BYTE_SECONDS,
            speedup={threads: max(wide[0] / seconds, 1.0) for threads, (seconds, _) in by_threads.items()},
        )
        rates = replace(rates, byte=_pass_seconds(rates))
        return replace(rates, operator=_operator_seconds(rates))
    finally:
        torch.set_num_threads(before)
        if kept:
            give_back_freed_memory()


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


def _products(columns: int, dtype: torch.dtype) -> tuple[float, StepWork]:
    """Forward and backward of linear layers, whose factors come from memory as in a training, and their work."""
    layers = nn.Sequential(*(nn.Linear(columns, columns, bias=False) for _ in range(_LAYERS))).to(dtype)
    given = torch.randn(_ROWS, columns).to(dtype).requires_grad_()
    return _of_step(lambda: layers(given).sum())


def _of_products(measured: Sequence[tuple[float, StepWork]]) -> tuple[float, float]:
    """Seconds of a FLOP and of a number that is read or written, by which two steps take what was measured."""
    rows = [[work.product_flops, work.product_elements] for _, work in measured]
    seconds = [each for each, _ in measured]
    found = torch.linalg.solve(torch.tensor(rows, dtype=torch.float64), torch.tensor(seconds, dtype=torch.float64))
    flop, element = found.tolist()
    if flop <= 0 or element < 0:  # narrow layers are no slower
        return seconds[0] / rows[0][0], 0.0
    return flop, element


def _attention_seconds(dtype: torch.dtype) -> float:
    """Seconds of a FLOP of attention, forward and backward."""
    query, key, value = (torch.randn(_HEADS).to(dtype).requires_grad_() for _ in range(3))
    seconds, work = _of_step(lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True).sum())
    return seconds / work.attention_flops if work.attention_flops else 0.0


def _pass_seconds(rates: Rates) -> float:
    """Seconds of a byte that is no product's: norms, activations, sums and a softmax, forward and backward."""
    given, beside = (torch.randn(_PASSES).requires_grad_() for _ in range(2))

    def forward() -> Tensor:
        normed = F.layer_norm(given, _PASSES[1:])
        gated = F.silu(normed) * beside + given
        return F.log_softmax(gated * 0.5, -1).square().mean()

    seconds, work = _of_step(forward)
    return max(seconds - sum(rates.computing(work, 1).values()), 0.0) / work.bytes


def _operator_seconds(rates: Rates) -> float:
    """What forward and backward of a tiny model take for each operator, beside its work."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU()) for _ in range(8)))
    given = torch.randn(4, 8)
    seconds, work = _of_step(lambda: model(given).sum())
    return max(seconds - sum(rates.computing(work, 1).values()), 0.0) / work.operators


def _of_step(forward: Callable[[], Tensor]) -> tuple[float, StepWork]:
    """Seconds of a forward with its backward, and its work."""
    counted = CountedWork()
    with counted:
        forward().backward()
    return _repeated(lambda: forward().backward()), counted.found()
