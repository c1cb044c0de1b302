"""The machine that a job is planned for: this one, whose cores are measured, or devices of a data sheet."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from samestep import environment
from samestep.comm.collectives import all_but_own
from samestep.errors import UserError
from samestep.input_files import parse_json, text_of
from samestep.launch.affinity import cores
from samestep.launch.memory import available_memory, give_back_freed_memory, keep_freed_memory
from samestep.limits import MOST_RANKS, check_whole
from samestep.planning.hardware import ClusterSpec
from samestep.progress import phases
from samestep.torch_internals.fakes import fake_store
from samestep.training.rehearsal import Collectives
from samestep.training.step_work import CountedWork, StepWork

# Causes of a rank's own time. "sharding" is FSDP2's gather and scatter hooks, which run in Python.
COMPUTE: Sequence[str] = ("products", "attention", "passes", "operators", "sharding")
CAUSES: Sequence[str] = (*COMPUTE, "messages", "bytes sent")

# Defaults without `samestep comm --json` or --measure: a message through shared memory between two ranks
# (docs/communication.md).
_MESSAGE_SECONDS, _BYTE_SECONDS = 1e-4, 1 / 2e9
_SECONDS = 0.2  # of each measurement
_ROWS, _LAYERS = 2048, 6  # tokens, and linear layers one after the other, whose products are measured
_WIDE, _NARROW = 512, 128  # columns of the layers: large products, and such as are bound by reading and writing
_HEADS = (4, 4, 256, 64)  # samples, heads, tokens and columns of the attention that is measured
_SHARDED = (2, 16)  # parameters of a unit that FSDP2 gathers
_PASSES = (2048, 512)  # rows and columns of the tensors that passes go over: 4 MiB, as activations have
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class MessageRate:
    """Messages of one kind of collective, as Hockney's model has them."""

    message: float  # seconds of one
    byte_sent: float  # seconds of a byte that a rank sends, by the formulas of `samestep.comm.traffic`


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Seconds of each unit of work on one thread, and of messages between ranks of this machine."""

    flop: float  # of products and convolutions
    product_element: float = 0.0  # an element that a product reads or writes; matters for narrow products
    attention_flop: float = 0.0  # in attention kernels
    byte: float  # read or written by operators other than products
    operator: float  # launch overhead of an operator, with autograd's
    shard_message: float = 0.0  # FSDP2's hooks around a gather or scatter of a unit, in addition to its transfer
    shard_tensor: float = 0.0  # the same, for each parameter of the unit
    message: float
    byte_sent: float
    kinds: Mapping[str, "MessageRate"] = field(default_factory=dict)  # collectives with measured rates
    speedup: Mapping[int, float] = field(default_factory=lambda: {1: 1.0})  # of products, by threads
    pass_speedup: Mapping[int, float] = field(default_factory=dict)  # of element-wise passes, if different
    source: str = "measured"

    def corrected(self, factors: Mapping[str, float]) -> "Rates":
        """Return the rates multiplied by a factor for each cause."""
        changed = {name: getattr(self, name) * factors[cause] for cause in factors for name in _RATES[cause]}
        kinds = {
            kind: MessageRate(
                message=rate.message * factors.get("messages", 1.0),
                byte_sent=rate.byte_sent * factors.get("bytes sent", 1.0),
            )
            for kind, rate in self.kinds.items()
        }
        return replace(self, **changed, kinds=kinds, source="corrected by measured steps")

    def sending(self, collectives: Sequence[Collectives]) -> tuple[float, float]:
        """Return the seconds of messages' latencies, and the seconds for their bytes."""
        usual = MessageRate(message=self.message, byte_sent=self.byte_sent)
        rates = [(collective, self.kinds.get(collective.kind, usual)) for collective in collectives]
        return sum(sent.count * rate.message for sent, rate in rates), sum(
            sent.sent * rate.byte_sent for sent, rate in rates
        )

    def computing(self, work: StepWork, threads: int) -> dict[str, float]:
        """Return the seconds of a rank's own computation, by cause."""
        products = _of_threads(self.speedup, threads)
        passes = _of_threads(self.pass_speedup or self.speedup, threads)
        seconds = (
            ((work.product_flops + work.other_flops) * self.flop + work.product_elements * self.product_element)
            / products,
            work.attention_flops * (self.attention_flop or self.flop) / products,
            work.bytes * self.byte / passes,
            work.operators * self.operator,  # issued by one thread
            work.shard_messages * self.shard_message + work.shard_tensors * self.shard_tensor,
        )
        return dict(zip(COMPUTE, seconds, strict=True))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def _of_threads(speedup: Mapping[int, float], threads: int) -> float:
    """Return the speedup of `threads` threads, or of the next smaller measured number."""
    return speedup.get(threads) or max(
        (factor for number, factor in speedup.items() if number <= threads), default=1.0
    )


_RATES: Mapping[str, Sequence[str]] = {
    "products": ("flop", "product_element"), "attention": ("attention_flop",), "passes": ("byte",),
    "operators": ("operator",), "sharding": ("shard_message", "shard_tensor"),
    "messages": ("message",), "bytes sent": ("byte_sent",),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TargetMachine:
    """Where ranks run: cores of this host, or the devices of a cluster."""

    name: str
    devices: int
    memory: float  # bytes of a device; of all ranks together on CPUs
    rates: Rates | None = None
    cores: int = 0  # that CPU ranks share
    cluster: ClusterSpec | None = None

    def __post_init__(self) -> None:
        check_whole("--devices", self.devices, most=MOST_RANKS)


def this_machine(devices: int | None, precision: str, comm: Path | None = None) -> TargetMachine:
    """The cores that this process may run on, measured in about a second."""
    number = cores()
    # Made first, since it refuses a wrong number of devices before anything is measured.
    machine = TargetMachine(
        name="this machine",
        devices=number if devices is None else devices,
        memory=float(available_memory()),
        cores=number,
    )
    with phases.phase("measuring the rates of this machine"):
        rates = measured_rates(precision)
    if comm is not None:
        rates = replace(rates, **message_rates(comm))
    return replace(machine, rates=rates)


def devices_of(cluster: ClusterSpec) -> TargetMachine:
    """Return a data sheet's devices, of whose memory 94 % is assumed to be usable."""
    device = cluster.device
    return TargetMachine(name=device.name, devices=cluster.devices, memory=0.94 * device.memory, cluster=cluster)


def measured_rates(precision: str) -> Rates:
    """Measure the rates of one thread, and the speedup of more; restores the number of threads.

    Freed memory is kept between calls, as ranks do.
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
        rates = replace(rates, byte=_pass_seconds(rates), pass_speedup=_pass_speedup())
        torch.set_num_threads(1)
        rates = replace(rates, operator=_operator_seconds(rates))
        message, tensor = _shard_seconds(rates)
        return replace(rates, shard_message=message, shard_tensor=tensor)
    finally:
        torch.set_num_threads(before)
        if kept:
            give_back_freed_memory()


def message_rates(file: Path) -> dict[str, Any]:
    """Read latency and seconds a byte of each collective from a file of `samestep comm --json`.

    Of several transports the one with the highest bandwidth counts, which ranks of a host choose.
    """
    try:
        told = parse_json(text_of(file))
        kinds: dict[str, MessageRate] = {}
        for fit in told["fits"]:
            kind = _KINDS.get(fit["collective"])
            if kind is None or not fit["bytes_per_second"]:
                continue
            rate = MessageRate(
                message=fit["latency_seconds"],
                byte_sent=1 / (kind.sent_share(fit["ranks"]) * fit["bytes_per_second"]),
            )
            if kind.name not in kinds or rate.byte_sent < kinds[kind.name].byte_sent:
                kinds[kind.name] = rate
        usual = kinds.pop("all-reduce")
    except (ValueError, KeyError, TypeError, ZeroDivisionError, OverflowError) as error:
        raise UserError(
            f"--comm {file}: no all-reduce measured at two sizes stands there ({type(error).__name__}); "
            "write it by samestep comm --json FILE"
        ) from None
    return {"message": usual.message, "byte_sent": usual.byte_sent, "kinds": kinds}


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """A collective of `samestep comm`: its name in rehearsals, and the fraction of its bytes that each rank sends."""

    name: str
    sent_share: Callable[[int], float]


_KINDS: Mapping[str, _Kind] = {
    "all-reduce": _Kind(name="all-reduce", sent_share=lambda ranks: 2 * all_but_own(ranks)),
    "all-gather": _Kind(name="all-gather", sent_share=all_but_own),
    "reduce-scatter": _Kind(name="reduce-scatter", sent_share=all_but_own),
    "all-to-all": _Kind(name="all-to-all", sent_share=all_but_own),
    "broadcast": _Kind(name="broadcast", sent_share=all_but_own),
    "reduce": _Kind(name="reduce", sent_share=all_but_own),
    "send/recv": _Kind(name="point-to-point", sent_share=lambda ranks: 1.0),
}


def _repeated(run: Callable[[], object]) -> float:
    """Return the seconds of the fastest call; slower ones were disturbed by other programs."""
    run()
    fastest, until = float("inf"), time.perf_counter() + _SECONDS
    while (began := time.perf_counter()) < until:
        run()
        fastest = min(fastest, time.perf_counter() - began)
    return fastest


def _products(columns: int, dtype: torch.dtype) -> tuple[float, StepWork]:
    """Time forward and backward of linear layers whose operands come from memory; return seconds and work."""
    layers = nn.Sequential(*(nn.Linear(columns, columns, bias=False) for _ in range(_LAYERS))).to(dtype)
    inputs = torch.randn(_ROWS, columns).to(dtype).requires_grad_()
    return _of_step(lambda: layers(inputs).sum())


def _of_products(measured: Sequence[tuple[float, StepWork]]) -> tuple[float, float]:
    """Solve for the seconds of a FLOP and of an element from two measured steps."""
    rows = [[work.product_flops, work.product_elements] for _, work in measured]
    seconds = [second for second, _ in measured]
    solution = torch.linalg.solve(torch.tensor(rows, dtype=torch.float64), torch.tensor(seconds, dtype=torch.float64))
    flop, element = solution.tolist()
    if flop <= 0 or element < 0:  # narrow layers are as fast
        return seconds[0] / rows[0][0], 0.0
    return flop, element


def _attention_seconds(dtype: torch.dtype) -> float:
    """Measure the seconds of a FLOP of attention, forward and backward."""
    query, key, value = (torch.randn(_HEADS).to(dtype).requires_grad_() for _ in range(3))
    seconds, work = _of_step(lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True).sum())
    return seconds / work.attention_flops if work.attention_flops else 0.0


def _pass_seconds(rates: Rates) -> float:
    """Seconds of a byte that is no product's: norms, activations, sums and a softmax, forward and backward."""
    seconds, work = _passes()
    return max(seconds - sum(rates.computing(work, 1).values()), 0.0) / work.bytes


def _pass_speedup() -> dict[int, float]:
    """Measure the speedup of element-wise passes, which share memory bandwidth and synchronize each time."""
    seconds: dict[int, float] = {}
    for threads in dict.fromkeys((1, cores())):
        torch.set_num_threads(threads)
        seconds[threads], _ = _passes()
    return {threads: max(seconds[1] / own_seconds, 1.0) for threads, own_seconds in seconds.items()}


def _passes() -> tuple[float, StepWork]:
    """Time element-wise operators only, which determine the memory rate; return seconds and work."""
    inputs, gate = (torch.randn(_PASSES).requires_grad_() for _ in range(2))

    def forward() -> Tensor:
        normed = F.layer_norm(inputs, _PASSES[1:])
        gated = F.silu(normed) * gate + inputs
        return F.log_softmax(gated * 0.5, -1).square().mean()

    return _of_step(forward)


def _operator_seconds(rates: Rates) -> float:
    """Measure an operator's overhead by forward and backward of a tiny model."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU()) for _ in range(8)))
    inputs = torch.randn(4, 8)
    seconds, work = _of_step(lambda: model(inputs).sum())
    return max(seconds - sum(rates.computing(work, 1).values()), 0.0) / work.operators


def _shard_seconds(rates: Rates) -> tuple[float, float]:
    """Measure FSDP2's hooks: seconds of each message, and of each parameter in one.

    Shards small units with few and with many parameters, in a fake process group as in a rehearsal.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if dist.is_initialized():  # a rank has its own group, and makes no plans
        return 0.0, 0.0
    rows: list[list[float]] = []
    seconds: list[float] = []
    dist.init_process_group("fake", store=fake_store(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        for parameters in _SHARDED:
            units = [nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(parameters))) for _ in range(4)]
            for unit in units:
                fully_shard(unit, mesh=mesh)
            model = nn.Sequential(*units)
            fully_shard(model, mesh=mesh)
            inputs = torch.randn(4, 8)
            measured, work = _of_step(lambda model=model, inputs=inputs: model(inputs).sum())
            rows.append([work.shard_messages, work.shard_tensors])
            seconds.append(max(measured - sum(rates.computing(work, 1).values()), 0.0))
    finally:
        dist.destroy_process_group()
    solution = torch.linalg.solve(torch.tensor(rows, dtype=torch.float64), torch.tensor(seconds, dtype=torch.float64))
    message, tensor = (max(value, 0.0) for value in solution.tolist())
    return message, tensor


def _of_step(forward: Callable[[], Tensor]) -> tuple[float, StepWork]:
    """Time a forward with its backward; return seconds and work."""
    counted = CountedWork()
    with counted:
        forward().backward()
    return _repeated(lambda: forward().backward()), counted.found()
