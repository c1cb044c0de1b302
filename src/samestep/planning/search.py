"""Searches the layouts of a job on a cluster for those that fit in memory, and ranks them by step time.

Candidates are pruned in three passes: sizes that don't divide are never generated, memory is computed before time,
and a pipeline's time is estimated from its slowest rank before the best ones are simulated event by event.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

from samestep.errors import UserError
from samestep.layout import Layout, Recompute, Schedule
from samestep.limits import divisors
from samestep.planning.hardware import ClusterSpec
from samestep.planning.memory import RankMemory, fits, memory_of, offloaded_bytes
from samestep.planning.pipeline_events import SPLIT_BACKWARD
from samestep.planning.shapes import Transformer
from samestep.planning.software import Software
from samestep.planning.stage_time import PlannedJob
from samestep.planning.step_time import StepTime, offloads_of, step_time

_PLAYED = 24  # number of the best candidates by estimate that are simulated event by event
_MOST_STAGES = 64
_MOST_CHUNKS = 8  # stages per rank
# Zero-bubble schedules are PyTorch's, whose import takes seconds: they are simulated only if their estimate is below
# this factor times the best one.
_NEAR = 1.05
_MOST_ZERO_BUBBLE = 16  # pipeline ranks up to which zero-bubble schedules are tried
_LONG = 16384  # tokens of a sample from which context parallel is tried
_RECOMPUTES: Sequence[Recompute] = ("none", "selective", "full")
_TOKENS_A_STEP = 4 * 2**20
_LARGE = 100e9  # parameters above which steps have 16 Mi tokens (Llama 3: arXiv 2407.21783, section 3.4.1)


@dataclass(frozen=True, kw_only=True)
class LayoutCandidate:
    """A layout with a micro-batch size, its memory by pipeline rank and its step time."""

    layout: Layout
    micro_batch: int
    memory: Sequence[RankMemory]
    time: StepTime

    @property
    def peak_bytes(self) -> float:
        return max(rank.total for rank in self.memory)

    def to_json(self, job: PlannedJob, cluster: ClusterSpec) -> dict[str, Any]:
        """A dict in seconds, bytes and tokens per second; utilisation is relative to the device's peak FLOPs."""
        return {
            "layout": str(self.layout),
            "micro_batch": self.micro_batch,
            "micro_batches": self.time.micro_batches,
            "step_seconds": self.time.seconds,
            "tokens_per_second": job.tokens / self.time.seconds,
            "model_flops_utilisation": self.time.utilisation(cluster.device, job.precision),
            "bound": self.time.bound,
            "seconds_by_cause": dict(self.time.parts),
            "peak_bytes": self.peak_bytes,
            "memory_by_pipeline_rank": [rank.to_json() for rank in self.memory],
        }


@dataclass(frozen=True, kw_only=True)
class ClusterPlan:
    """The candidates found for a job on a cluster, fastest first."""

    job: PlannedJob
    cluster: ClusterSpec
    candidates: Sequence[LayoutCandidate]
    tried: int
    too_large: int  # number of tried ones that don't fit in memory

    @property
    def best(self) -> LayoutCandidate:
        return self.candidates[0]


def usual_batch(model: Transformer, devices: int) -> int:
    """The default global batch in samples: 4 Mi tokens, 16 Mi from 100 billion parameters, as in published trainings.

    Rounded up to a multiple of `devices`, so that 7 or 12 devices can be data ranks too; not for a large model whose
    batch has fewer samples than that.
    """
    tokens = _TOKENS_A_STEP * (4 if model.parameters >= _LARGE else 1)
    samples = max(1, tokens // model.seq)
    if samples < devices and model.parameters >= _LARGE:
        return samples
    return -(-samples // devices) * devices


def plan(job: PlannedJob, cluster: ClusterSpec, *, most: int = 10) -> ClusterPlan:
    """Find the `most` fastest layouts of a job on a cluster.

    Raises UserError if no layout fits in memory.
    """
    fitting: list[tuple[float, Layout, int, list[RankMemory]]] = []
    tried = 0
    smallest: tuple[float, Layout] | None = None
    for offloaded in (False, True) if job.software.offloads else (False,):
        for layout, micro_batch in candidates(job, cluster, offloaded=offloaded):
            tried += 1
            memory = memory_of(job, layout, micro_batch)
            peak = max(rank.total for rank in memory)
            if smallest is None or peak < smallest[0]:
                smallest = peak, layout
            if fits(memory, cluster.device):
                seconds = step_time(job, layout, micro_batch, cluster, played=False).seconds
                fitting.append((seconds, layout, micro_batch, memory))
        if fitting:
            break  # offload is tried only if nothing else fits: its time was never compared with a measured step
    if not fitting:
        raise UserError(_nothing_fits(job, cluster, smallest))
    fitting.sort(key=lambda timed: timed[0])
    too_large = tried - len(fitting)
    fitting = [
        timed for timed in fitting if timed[1].schedule not in SPLIT_BACKWARD or timed[0] < _NEAR * fitting[0][0]
    ]
    played = [
        LayoutCandidate(layout=layout, micro_batch=size, memory=memory, time=step_time(job, layout, size, cluster))
        for _, layout, size, memory in fitting[: max(_PLAYED, most)]
    ]
    played.sort(key=lambda candidate: (candidate.time.seconds, candidate.peak_bytes))
    return ClusterPlan(job=job, cluster=cluster, candidates=played[:most], tried=tried, too_large=too_large)


def _nothing_fits(job: PlannedJob, cluster: ClusterSpec, smallest: tuple[float, Layout] | None) -> str:
    """The message if no layout fits, with the smallest one and the memory that it needs."""
    where = f"{cluster.devices} x {cluster.device.name}"
    if smallest is None:
        return (
            f"{job.model.name} with a global batch of {job.global_batch} has no layout on {where}; "
            f"use a --global-batch that is a multiple of {cluster.devices}, or fewer devices"
        )
    peak, layout = smallest
    return (
        f'{job.model.name} does not fit on {where}: the smallest layout, "{layout}", needs {peak / 1e9:.0f} GB of '
        f"{cluster.device.memory / 1e9:.0f} GB a device; use more devices (--minimum says how many)"
    )


def candidates(job: PlannedJob, cluster: ClusterSpec, *, offloaded: bool = False) -> Iterator[tuple[Layout, int]]:
    """Generate layouts and micro-batch sizes whose sizes divide what they split; `offloaded`: only with offload."""
    if offloaded:
        for layout, micro_batch in candidates(job, cluster):
            yield from ((layout_, micro_batch) for layout_ in offloads_of(layout))
        return
    model = job.model
    for tensor in divisors(min(cluster.node_size, cluster.devices)):
        if model.heads % tensor or cluster.devices % tensor:
            continue
        for pipeline in divisors(cluster.devices // tensor):
            if pipeline > min(model.layers, _MOST_STAGES):
                continue
            for context in _contexts(model, cluster.devices // (tensor * pipeline)):
                data = cluster.devices // (tensor * pipeline * context)
                if data > job.global_batch or job.global_batch % data:
                    continue
                base = _sequence(Layout(pipeline=pipeline, context=context, tensor=tensor), job.software)
                for layout in _all_shardings(job, base, data, cluster):
                    yield from _details(job, layout, job.global_batch // data)


def _sequence(base: Layout, software: Software) -> Layout:
    """The layout with sequence parallel, where it has tensor parallel and the program can combine its axes."""
    twice = base.pipeline > 1 and base.context > 1
    return base if base.tensor == 1 or (twice and not software.splits_twice) else replace(base, sequence="split")


def _contexts(model: Transformer, left: int) -> list[int]:
    """Sizes of the context axis to try: for long samples, those with at least 2,048 tokens per rank; else 1."""
    if model.seq < _LONG:
        return [1]
    return [size for size in divisors(left) if model.seq % size == 0 and model.seq // size >= 2048]


def _all_shardings(job: PlannedJob, base: Layout, data: int, cluster: ClusterSpec) -> Iterator[Layout]:
    """The shardings that a program supports, with each possible size of the expert axis."""
    for expert in divisors(min(job.model.experts, data)):
        if job.model.experts % expert or data % expert:
            continue
        for layout in _shardings(base, data // expert, cluster):
            if layout.zero in job.software.zero_stages:
                yield replace(layout, expert=expert)


def _shardings(base: Layout, data: int, cluster: ClusterSpec) -> Iterator[Layout]:
    """The ways to replicate or shard parameters, gradients and optimizer state over `data` ranks."""
    if data == 1:
        yield base
        return
    yield replace(base, replicate=data)
    yield replace(base, shard=data, zero=1)
    if base.pipeline == 1:
        yield replace(base, shard=data, zero=2)
        yield replace(base, shard=data, zero=3)
        inside = cluster.node_size // base.tensor
        for part in (inside, 8 * inside):  # hybrid sharding: shards within a part of the cluster, replicas across
            if 1 < part < data and data % part == 0:
                yield replace(base, replicate=data // part, shard=part, zero=3)


def _details(job: PlannedJob, layout: Layout, samples: int) -> Iterator[tuple[Layout, int]]:
    """The schedules, recomputation and micro-batch sizes to try for a mesh; `samples` is per data rank."""
    for micro_batch in (1, 2, 4, 8, 16, 32, 64):
        if samples % micro_batch:
            break
        micro_batches = samples // micro_batch
        if micro_batches < layout.pipeline:
            break
        for scheduled in _schedules(layout, job.model.layers, micro_batches):
            for recompute in _RECOMPUTES:
                yield replace(scheduled, recompute=recompute), micro_batch
        if job.software.zero_bubble:
            for scheduled in _zero_bubbles(layout, job.model.layers, micro_batches):
                yield scheduled, micro_batch


def _zero_bubbles(layout: Layout, layers: int, micro_batches: int) -> Iterator[Layout]:
    """The layout with zero-bubble schedules, which fill bubbles with weight gradients (Qi et al., arXiv 2401.10241).

    They support neither recomputation nor sharded parameters.
    """
    possible = 1 < layout.pipeline <= _MOST_ZERO_BUBBLE and layout.zero <= 1
    if not possible or micro_batches % layout.pipeline:
        return
    for schedule in SPLIT_BACKWARD:
        for stages in (1, 2) if schedule == "interleaved-zero-bubble" else (2,):
            if stages * layout.pipeline <= layers:
                yield replace(layout, schedule=schedule, stages=stages)


def _schedules(layout: Layout, layers: int, micro_batches: int) -> Iterator[Layout]:
    """The layout, and if micro-batches and layers divide, the layout with interleaved 1F1B."""
    yield layout
    if layout.pipeline == 1 or micro_batches % layout.pipeline:
        return
    schedule: Schedule = "interleaved-1f1b"
    for chunks in range(2, _MOST_CHUNKS + 1):
        stages = layout.pipeline * chunks
        # Even stages, or even with the embedding and the head counted as a layer each, as in Llama 3 405B.
        if stages <= layers and (layers % stages == 0 or (layers + 2) % stages == 0):
            yield replace(layout, schedule=schedule, stages=chunks)


def why_slower(candidate: LayoutCandidate, best: LayoutCandidate) -> str:
    """The part of the step whose time exceeds the best layout's most, with the seconds; empty if none does."""
    more = {
        name: candidate.time.parts.get(name, 0.0) - best.time.parts.get(name, 0.0)
        for name in {*candidate.time.parts, *best.time.parts}
    }
    name = max(more, key=lambda cause: more[cause])
    if more[name] <= 0:
        return ""
    return f"+{more[name]:.2g} s {name}"


@dataclass(frozen=True, kw_only=True)
class Lever:
    """A way to save memory, with the fewest devices on which the model then fits."""

    name: str
    devices: int | None  # None: it fits on no number that was tried
    layout: Layout | None = None
    peak_bytes: float = 0.0
    host_bytes: float = 0.0  # offloaded to a node's memory

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "layout": str(self.layout) if self.layout else None}


_LEVERS: Mapping[str, Mapping[str, Any]] = {
    "replicas": {"zero": (0,), "recompute": ("none",), "tensor": False, "offload": ("none",)},
    "optimizer state sharded (zero1)": {"zero": (1,), "recompute": ("none",), "tensor": False, "offload": ("none",)},
    "parameters sharded (fsdp)": {"zero": (3,), "recompute": ("none",), "tensor": False, "offload": ("none",)},
    "fsdp, recompute=full": {"zero": (3,), "recompute": ("full",), "tensor": False, "offload": ("none",)},
    "fsdp, tp, recompute=full": {"zero": (3,), "recompute": ("full",), "tensor": True, "offload": ("none",)},
    "fsdp, tp, recompute=full, offload=activations+optimizer": {
        "zero": (3,), "recompute": ("full",), "tensor": True, "offload": ("activations+optimizer",),
    },
    "fsdp, tp, recompute=full, offload=activations+parameters": {
        "zero": (3,), "recompute": ("full",), "tensor": True, "offload": ("activations+parameters",),
    },
}  # fmt: skip


def minimum(job: PlannedJob, cluster: ClusterSpec, *, most_devices: int = 65536) -> list[Lever]:
    """For each lever, find the fewest devices (a power of two) on which one sample per data rank fits."""
    levers = []
    for name, lever in _LEVERS.items():
        shown = name.replace("tp,", "tp, cp,") if job.model.seq >= _LONG else name
        levers.append(_fewest(shown, lever, job, cluster, most_devices))
    return levers


def _fewest(name: str, lever: Mapping[str, Any], job: PlannedJob, cluster: ClusterSpec, most_devices: int) -> Lever:
    devices = 1
    while devices <= most_devices:
        for layout in _levered(lever, devices, cluster.node_size, job.model):
            one_each = replace(job, global_batch=layout.data_ranks)
            memory = memory_of(one_each, layout, 1)
            if fits(memory, cluster.device):
                peak = max(rank.total for rank in memory)
                host = offloaded_bytes(job.model, layout) * min(devices, cluster.node_size)
                return Lever(name=name, devices=devices, layout=layout, peak_bytes=peak, host_bytes=host)
        devices *= 2
    return Lever(name=name, devices=None)


def _levered(lever: Mapping[str, Any], devices: int, node_size: int, model: Transformer) -> Iterator[Layout]:
    for tensor in (1, 2, 4, 8) if lever["tensor"] else (1,):
        if tensor > node_size or model.heads % tensor or devices % tensor:
            continue
        for context in _contexts(model, devices // tensor) if lever["tensor"] else (1,):
            data = devices // (tensor * context)
            for zero, recompute, offload in product(lever["zero"], lever["recompute"], lever["offload"]):
                yield Layout(
                    replicate=1 if zero else data,
                    shard=data if zero else 1,
                    zero=zero,
                    context=context,
                    tensor=tensor,
                    sequence="split" if tensor > 1 else "whole",
                    recompute=recompute,
                    offload=offload,
                )
