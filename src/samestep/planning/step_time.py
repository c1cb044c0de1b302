"""The time of one optimizer step of a layout: pipeline simulation, gradient reduction and optimizer update.

    step = slowest device's factor * (micro-batches of the busiest rank + pipeline bubble)
           + exposed gradient reduction + optimizer + offload

Parts are the busiest rank's seconds by cause, scaled so that they add up to the step.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, log, sqrt

from samestep.layout import Layout
from samestep.planning import collectives, pipeline_events
from samestep.planning.hardware import HOST_EFFICIENCY, HOSTS, LINKS, ClusterSpec, Device
from samestep.planning.memory import held_parameters, kept_activations
from samestep.planning.operators import OperatorTimes
from samestep.planning.pipeline_events import SPLIT_BACKWARD, StageTimes
from samestep.planning.shapes import Transformer
from samestep.planning.stage_time import (
    CONTENTION,
    PlannedJob,
    PlannedStages,
    data_group,
    groups,
    layer_parameters,
    stages_of,
)

# Relative standard deviation of the time that devices of one kind take for the same work (Sinha et al., arXiv
# 2208.11035: GPUs of one kind in one cluster differ by several per cent).
_SPREAD = 0.015

_STEPPED_BYTES = 32.0  # memory traffic of Adam per parameter: three numbers of 4 bytes each way, gradient, result


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The seconds of one step, and their parts by cause on the busiest rank."""

    seconds: float
    parts: Mapping[str, float]  # seconds by cause; their sum is `seconds`
    stages: Sequence[StageTimes]
    micro_batches: int
    flops: float  # model FLOPs per device
    bound: str  # name of the largest part
    links: Mapping[str, str] = field(default_factory=dict)  # the link that limits each part with communication

    def utilisation(self, device: Device, precision: str) -> float:
        return self.flops / self.seconds / device.flops[precision]


def step_time(
    job: PlannedJob, layout: Layout, micro_batch: int, cluster: ClusterSpec, *, played: bool = True
) -> StepTime:
    """Compute the time of a step of `job` under `layout` with micro-batches of `micro_batch` samples.

    A pipeline is simulated event by event if `played`, and else estimated from its slowest rank.
    """
    micro_batches = max(1, ceil(job.global_batch / (layout.data_ranks * micro_batch)))
    made = stages_of(job, layout, micro_batch, cluster)
    stages = made.times
    busy = _busiest(layout, stages)
    if layout.pipeline == 1:
        # Without a pipeline, the micro-batches run one after the other.
        run = micro_batches * busy
    elif played:
        run = pipeline_events.elapsed(layout, stages, micro_batches)
    else:
        run = estimated(layout, stages, micro_batches)
    # Only the exposed part: what overlaps the last backward is part of `run`.
    reduce, link = _gradient_reduction(job, layout, cluster, stages)
    update = 0.0 if _steps_on_host(layout) else _update(job, layout, cluster)
    host = offload_seconds(job, layout, micro_batch, micro_batches, cluster)
    parts = _parts(job, layout, made, micro_batches)
    # The schedule's idle time of the busiest rank.
    parts["pipeline bubble"] = max(run - micro_batches * busy, 0.0)
    parts["gradients"] = reduce
    parts["optimizer"] = update
    parts["offload"] = host
    slowest = slowest_of(cluster.devices) - 1
    parts["slowest device"] = slowest * run
    run *= 1 + slowest
    total = run + reduce + update + host
    scale = total / sum(parts.values())
    parts = {name: seconds * scale for name, seconds in parts.items() if seconds > 0}
    return StepTime(
        seconds=total,
        parts=parts,
        stages=stages,
        micro_batches=micro_batches,
        flops=job.model.model_flops(job.tokens) / layout.size,
        bound=max(parts, key=lambda name: parts[name]),
        links=_links(layout, cluster, link),
    )


def _steps_on_host(layout: Layout) -> bool:
    return layout.offloads("optimizer") or layout.offloads_parameters


def _links(layout: Layout, cluster: ClusterSpec, gradients: str) -> Mapping[str, str]:
    """The link that limits each kind of communication."""
    links = {"gradients": gradients, "gathering parameters": gradients}
    if layout.tensor * layout.context > 1:
        group = data_group(layout, ("context", "tensor"))
        links["tensor and context traffic"] = collectives.route(group, cluster).name
    return links


def slowest_of(devices: int) -> float:
    """Expected time of the slowest of `devices` devices relative to the mean one; every step waits for it.

    The expected maximum of n normal variables is about sqrt(2 ln n) standard deviations above their mean.
    """
    return 1 + _SPREAD * sqrt(2 * log(devices)) if devices > 1 else 1.0


def estimated(layout: Layout, stages: Sequence[StageTimes], micro_batches: int) -> float:
    """Estimate a pipeline's time from its busiest rank's work and the bubble (arXiv 2104.04473, section 2.2)."""
    busy = _busiest(layout, stages)
    sends = 2 * max(stage.send for stage in stages)
    stage_busy = busy / layout.stages_a_rank
    idle = (layout.pipeline - 1) * (stage_busy + sends)
    if layout.schedule in pipeline_events.SPLIT_BACKWARD:
        idle /= 3
    steady = micro_batches * layout.stages_a_rank * sends if layout.schedule != "gpipe" else 0.0
    return micro_batches * busy + idle + min(steady, 0.1 * micro_batches * busy)


def _busiest(layout: Layout, stages: Sequence[StageTimes]) -> float:
    """Seconds of forward and backward of one micro-batch on the busiest pipeline rank."""
    return max(_by_rank(layout, [stage.forward + stage.backward for stage in stages]))


def _by_rank(layout: Layout, seconds: Sequence[float]) -> list[float]:
    """Sum the seconds of stages by the pipeline rank that holds them."""
    if layout.pipeline == 1:
        return [sum(seconds)]
    sums = [0.0] * layout.pipeline
    for rank, own_seconds in zip(
        pipeline_events.owners(layout.schedule, layout.pipeline, layout.stages_a_rank), seconds, strict=True
    ):
        sums[rank] += own_seconds
    return sums


def _gradient_reduction(
    job: PlannedJob, layout: Layout, cluster: ClusterSpec, stages: Sequence[StageTimes]
) -> tuple[float, str]:
    """Exposed seconds of a step's gradient reduction and ZeRO's all-gather of parameters, and the limiting link."""
    group = data_group(layout, ("replicate", "shard", "expert", "context"))
    if group.size == 1:
        return 0.0, ""
    held = _held_parameters(job.model, layout) * job.model.trained
    size = held * job.software.gradient_bytes
    link = collectives.route(group, cluster).name
    if layout.zero >= 3 and layout.shard > 1:
        if layout.replicate == 1:
            return 0.0, link
        group = groups(layout)["replicate"]
        # FSDP2 has reduce-scattered along the shard axis during backward; the all-reduce over replicas remains.
        seconds = collectives.all_reduce(size / layout.shard, group, cluster)
    elif layout.zero == 2 and layout.shard > 1:
        seconds = collectives.all_gather(2 * held, group, cluster)
    elif layout.zero and layout.shard > 1:
        # A reduce-scatter to the owners, and an all-gather of the updated parameters (2 bytes each).
        seconds = collectives.reduce_scatter(size, group, cluster) + collectives.all_gather(2 * held, group, cluster)
    else:
        seconds = collectives.all_reduce(size, group, cluster)
    if not job.software.overlaps_gradients:
        return seconds, link
    # All but the last bucket overlaps the last micro-batch's backward, and with ZeRO the next step's first forward.
    behind = max(_by_rank(layout, [stage.backward + (layout.zero > 0) * stage.forward for stage in stages]))
    hidden = min(seconds, behind)
    last = seconds / max(job.model.layers / layout.pipeline, 1)
    exposed = max(seconds - behind, 0.0) + min(last, seconds) + CONTENTION * hidden
    return exposed, link


def _update(job: PlannedJob, layout: Layout, cluster: ClusterSpec) -> float:
    """Seconds of the optimizer's memory traffic for the parameters whose state a rank holds."""
    device = cluster.device
    held = _held_parameters(job.model, layout) * job.model.trained
    if layout.zero and layout.shard > 1:
        held /= layout.shard * layout.context
    return held * job.software.optimizer_bytes / (device.bandwidth * device.efficiency.bandwidth)


def _held_parameters(model: Transformer, layout: Layout) -> float:
    """Parameters of the rank with most of them, before sharding over data ranks."""
    ends = model.embedding_parameters
    if layout.pipeline == 1:
        ends += model.head_parameters
    layers = ceil(model.layers / layout.pipeline)
    return layers * sum(layer_parameters(model, layout)) + ends / layout.tensor


def _parts(job: PlannedJob, layout: Layout, made: PlannedStages, micro_batches: int) -> dict[str, float]:
    """Seconds of a step's layers by cause, which the caller scales to the step's time."""
    layer, layers = made.layer, ceil(job.model.layers / layout.pipeline)
    work = OperatorTimes().combined(layer.backward, layers).combined(layer.forward, layers)
    traffic = layers * (layer.backward_exposed + layer.forward_exposed)
    work = work.combined(layer.recomputation, layers)
    traffic += layers * layer.forward_exposed * (layout.recompute == "full")
    parts = {
        "matrix products": work.matmul_seconds,
        "attention": work.attention_seconds,
        "memory bandwidth": work.memory_seconds,
        "tensor and context traffic": traffic,
        "gathering parameters": made.gathering,
    }
    if work.host_seconds > work.seconds + traffic:
        parts = {"host issuing operators": work.host_seconds}
    return {name: micro_batches * seconds for name, seconds in parts.items()}


def with_micro_batches(job: PlannedJob, layout: Layout) -> list[int]:
    """Powers of two that divide a data rank's samples and give at least one micro-batch per pipeline rank."""
    samples = max(1, job.global_batch // layout.data_ranks)
    sizes = {2**power for power in range(7) if samples % 2**power == 0}
    return sorted(size for size in sizes if samples // size >= layout.pipeline) or [1]


def offloads_of(layout: Layout) -> Iterator[Layout]:
    """The layout with each offload to try: activations, and with full recomputation the optimizer or parameters."""
    if layout.schedule in SPLIT_BACKWARD:
        return
    if layout.recompute == "none":
        yield replace(layout, offload="activations")
    elif layout.recompute == "full":
        yield replace(layout, offload="optimizer")
        yield replace(layout, offload="activations+optimizer")
        if layout.zero == 3:  # ZeRO-2 holds all parameters from forward to backward
            yield replace(layout, offload="activations+parameters")


def offload_seconds(
    job: PlannedJob, layout: Layout, micro_batch: int, micro_batches: int, cluster: ClusterSpec
) -> float:
    """Seconds that offload adds to a rank's step: copies, and the optimizer's step on the host.

    Activations are copied in order with the device's work, so the copies are exposed. Complete gradients are copied
    to the host, which steps, and the parameters are copied back (Ren et al., arXiv 2101.06840, section 4, not
    delayed).
    """
    if layout.offload == "none":
        return 0.0
    host = HOSTS[cluster.device.kind]
    link = HOST_EFFICIENCY * LINKS[host.link].rate
    layers = ceil(job.model.layers / layout.pipeline)
    seconds = 0.0
    if layout.offloads("activations"):
        kept = layers * kept_activations(job.model, micro_batch, layout, job.software, job.precision)
        seconds += micro_batches * 2 * kept / link
    if layout.offloads("optimizer") or layout.offloads_parameters:
        shared, experts = held_parameters(job.model, layout, layers, first=True, last=layout.pipeline == 1)
        owned = shared / (layout.shard * layout.expert if layout.zero else 1)
        owned += experts / (layout.shard if layout.zero else 1)
        trained = owned * job.model.trained
        seconds += trained * (job.software.kept_gradient_bytes + 2.0) / link
        seconds += trained * _STEPPED_BYTES / (HOST_EFFICIENCY * host.bandwidth)
        if layout.offloads_parameters:  # shards are copied to the device for each forward and backward
            seconds += micro_batches * 2 * 2.0 * owned / link
    return seconds
