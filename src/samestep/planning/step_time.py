"""The time of one optimizer step of a layout: work of each stage, traffic between ranks, pipeline, update."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import ceil, log, sqrt

from samestep.layout import Layout
from samestep.planning import collectives, operators, pipeline_events
from samestep.planning.collectives import Group
from samestep.planning.hardware import Cluster, Device
from samestep.planning.operators import Piece, Work
from samestep.planning.pipeline_events import StageTimes
from samestep.planning.shapes import Transformer
from samestep.planning.software import Software

# Kernels of a collective take some of the processors that products could use (arXiv 2305.06942, section 3: NCCL runs
# in 2 to 24 blocks of 108): of the time in which both run, so much is lost to products.
_CONTENTION = 0.1

# Standard deviation of the time that equal devices take for the same work (Sinha et al., arXiv 2208.11035: GPUs of
# one kind in one cluster differ by several per cent).
_SPREAD = 0.015

_LAUNCHES_OF_SLICES = 6  # operators issued for tensor parallel's collectives, a layer and direction


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is trained in one step, and by which program."""

    model: Transformer
    global_batch: int  # samples
    precision: str
    software: Software

    @property
    def tokens(self) -> int:
        return self.global_batch * self.model.seq


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The seconds of one step, and where they go (on the rank that takes longest)."""

    seconds: float
    parts: Mapping[str, float]  # seconds by what is waited for; their sum is `seconds`
    stages: Sequence[StageTimes]
    micro_batches: int
    flops: float  # model FLOPs a device
    bound: str  # the largest part
    links: Mapping[str, str] = field(default_factory=dict)  # the link behind each part that waits for one

    def utilisation(self, device: Device, precision: str) -> float:
        return self.flops / self.seconds / device.flops[precision]


@dataclass(frozen=True, kw_only=True)
class LayerTime:
    """One layer's micro-batch on one device: compute, and what tensor and context parallel leave exposed."""

    forward: Work
    recomputation: Work
    backward: Work
    forward_exposed: float  # seconds of traffic that nothing hides
    backward_exposed: float

    def direction(self, *, backward: bool) -> tuple[Work, float]:
        return (self.backward, self.backward_exposed) if backward else (self.forward, self.forward_exposed)


def groups(layout: Layout) -> Mapping[str, Group]:
    """The ranks that each mesh axis joins, by the order in which the layout places axes (innermost: stride 1)."""
    found: dict[str, Group] = {}
    stride = 1
    for name in reversed(layout.placement):
        size = getattr(layout, name)
        found[name] = Group(size=size, stride=stride)
        stride *= size
    return found


def step_time(job: Job, layout: Layout, micro_batch: int, cluster: Cluster, *, played: bool = True) -> StepTime:
    """The time of a step of `job` under `layout` in micro-batches of `micro_batch` samples.

    A pipeline is played event by event, or estimated from its slowest rank where not `played`.
    """
    micro_batches = max(1, ceil(job.global_batch / (layout.data_ranks * micro_batch)))
    layer = _layer_time(job, layout, micro_batch, cluster)
    stages, gathered = _stages(job, layout, micro_batch, cluster, layer)
    busy = _busiest(layout, stages)
    if layout.pipeline == 1:
        run = micro_batches * busy
    elif played:
        run = pipeline_events.elapsed(layout, stages, micro_batches)
    else:
        run = estimated(layout, stages, micro_batches)
    reduce, link = _gradient_reduction(job, layout, cluster, stages)
    update = _update(job, layout, cluster)
    parts = _parts(job, layout, layer, micro_batches, stages, gathered)
    parts["pipeline bubble"] = max(run - micro_batches * busy, 0.0)
    parts["gradients"] = reduce
    parts["optimizer"] = update
    slowest = slowest_of(cluster.devices) - 1
    parts["slowest device"] = slowest * run
    run *= 1 + slowest
    total = run + reduce + update
    parts = {name: seconds for name, seconds in parts.items() if seconds > 0}
    scale = (run + reduce + update) / sum(parts.values())
    parts = {name: seconds * scale for name, seconds in parts.items()}
    return StepTime(
        seconds=total,
        parts=parts,
        stages=stages,
        micro_batches=micro_batches,
        flops=job.model.model_flops(job.tokens) / layout.size,
        bound=max(parts, key=lambda name: parts[name]),
        links=_links(layout, cluster, link),
    )


def _links(layout: Layout, cluster: Cluster, gradients: str) -> Mapping[str, str]:
    """The link that bounds each kind of traffic."""
    found = {"gradients": gradients, "gathering parameters": gradients}
    if layout.tensor * layout.context > 1:
        group = _data_group(layout, ("context", "tensor"))
        found["tensor and context traffic"] = collectives.route(group, cluster).name
    return found


def slowest_of(devices: int) -> float:
    """How much longer the slowest of so many devices takes than the mean one: every step waits for it.

    The expected largest of n normal numbers is about sqrt(2 ln n) standard deviations above their mean.
    """
    return 1 + _SPREAD * sqrt(2 * log(devices)) if devices > 1 else 1.0


def estimated(layout: Layout, stages: Sequence[StageTimes], micro_batches: int) -> float:
    """A pipeline's time from its slowest rank: its own work, and the bubble (arXiv 2104.04473, section 2.2)."""
    busy = _busiest(layout, stages)
    sends = 2 * max(stage.send for stage in stages)
    each = busy / layout.stages_a_rank
    idle = (layout.pipeline - 1) * (each + sends)
    if layout.schedule in ("interleaved-zero-bubble", "zbv-zero-bubble"):
        idle /= 3
    steady = micro_batches * layout.stages_a_rank * sends if layout.schedule != "gpipe" else 0.0
    return micro_batches * busy + idle + min(steady, 0.1 * micro_batches * busy)


def _busiest(layout: Layout, stages: Sequence[StageTimes]) -> float:
    """Seconds of a micro-batch on the rank that has most to do."""
    return max(_by_rank(layout, [stage.forward + stage.backward for stage in stages]))


def _by_rank(layout: Layout, seconds: Sequence[float]) -> list[float]:
    """The seconds of stages, summed on the pipeline ranks that hold them."""
    if layout.pipeline == 1:
        return [sum(seconds)]
    sums = [0.0] * layout.pipeline
    for rank, each in zip(
        pipeline_events.owners(layout.schedule, layout.pipeline, layout.stages_a_rank), seconds, strict=True
    ):
        sums[rank] += each
    return sums


def layers_of_stages(layers: int, stages: int) -> list[int]:
    """How many layers each stage has: as even as can be, fewer beside the embedding and the head."""
    each, more = divmod(layers, stages)
    counts = [each] * stages
    middle = [*range(1, stages - 1), 0, stages - 1] if stages > 2 else list(range(stages))
    for index in middle[:more]:
        counts[index] += 1
    return counts


def _stages(
    job: Job, layout: Layout, micro_batch: int, cluster: Cluster, layer: LayerTime
) -> tuple[list[StageTimes], float]:
    """The times of each stage, and the seconds a micro-batch that gathering parameters adds to them."""
    count = layout.pipeline * layout.stages_a_rank if layout.pipeline > 1 else 1
    piece = _piece(job, layout, micro_batch)
    embedding = _embedding(job.model, piece, job.software, cluster.device, job.precision)
    head_forward, head_backward = _head(job.model, piece, job.software, cluster.device, job.precision)
    send = 0.0
    if count > 1:
        size = 2.0 * micro_batch * piece.tokens * job.model.hidden / layout.tensor
        send = collectives.send(size, groups(layout)["pipeline"], cluster)
    found, exposed = [], 0.0
    for index, layers in enumerate(layers_of_stages(job.model.layers, count)):
        times = []
        for backward in (False, True):
            work, traffic = layer.direction(backward=backward)
            whole, comm = Work().combined(work, layers), layers * traffic
            if backward:
                whole = whole.combined(layer.recomputation, layers)
                comm += layers * layer.forward_exposed * (layout.recompute == "full")
            if index == 0:
                whole = whole.combined(embedding, 0.6 if backward else 0.4)
            if index == count - 1:
                whole = whole + (head_backward if backward else head_forward)
            device_seconds = whole.seconds + comm
            host_seconds = whole.host_seconds + layers * _LAUNCHES_OF_SLICES * _launch(job, cluster) * (
                layout.tensor > 1
            )
            gathering, waits = _shard_traffic(job, layout, cluster, layers, index, count, backward=backward)
            if gathering:
                overlapped = min(gathering, device_seconds)
                added = _CONTENTION * overlapped + max(gathering - device_seconds, 0.0) + waits
                exposed += added
                device_seconds += added
            times.append((operators.issued(device_seconds, host_seconds), whole.seconds))
        weights = times[1][0] * 0.45 if layout.recompute != "full" else times[1][0] * 0.3
        found.append(StageTimes(forward=times[0][0], backward=times[1][0], weights=weights, send=send))
    return found, exposed


def _launch(job: Job, cluster: Cluster) -> float:
    """Seconds of the host for one counted operator."""
    return job.software.launches * cluster.device.efficiency.launch_seconds


def _shard_traffic(
    job: Job, layout: Layout, cluster: Cluster, layers: int, index: int, count: int, *, backward: bool
) -> tuple[float, float]:
    """Seconds of gathering parameters and scattering gradients of a stage, and the part before it computes.

    ZeRO-3 and FSDP gather each layer before its forward and its backward, and scatter its gradients after it; ZeRO-2
    does the latter alone.
    """
    if layout.zero < 2 or layout.shard == 1 or (layout.zero == 2 and not backward):
        return 0.0, 0.0
    model, group = job.model, _data_group(layout, ("shard", "context"))
    each = 2.0 * model.layer_parameters / layout.tensor
    ends = 2.0 * model.embedding_parameters / layout.tensor if index in (0, count - 1) else 0.0
    one = collectives.all_gather(each, group, cluster)
    gathered = layers * one + collectives.all_gather(ends, group, cluster)
    if not backward:
        return gathered, one
    wire = job.software.gradient_bytes / 2
    return (wire if layout.zero == 2 else 1 + wire) * gathered, one * wire


def _gradient_reduction(
    job: Job, layout: Layout, cluster: Cluster, stages: Sequence[StageTimes]
) -> tuple[float, str]:
    """Exposed seconds of reducing a step's gradients (and gathering ZeRO's parameters), and the link."""
    group = _data_group(layout, ("replicate", "shard", "expert", "context"))
    if group.size == 1:
        return 0.0, ""
    held = _held_parameters(job.model, layout)
    size = held * job.software.gradient_bytes
    link = collectives.route(group, cluster).name
    if layout.zero >= 3 and layout.shard > 1:
        if layout.replicate == 1:
            return 0.0, link
        group = groups(layout)["replicate"]
        seconds = collectives.all_reduce(size / layout.shard, group, cluster)
    elif layout.zero == 2 and layout.shard > 1:
        seconds = collectives.all_gather(2 * held, group, cluster)
    elif layout.zero and layout.shard > 1:
        seconds = collectives.reduce_scatter(size, group, cluster) + collectives.all_gather(2 * held, group, cluster)
    else:
        seconds = collectives.all_reduce(size, group, cluster)
    if not job.software.overlaps_gradients:
        return seconds, link
    # It runs behind the last micro-batch's backward (and the next step's first forward), but for the last bucket.
    behind = max(_by_rank(layout, [stage.backward + (layout.zero > 0) * stage.forward for stage in stages]))
    hidden = min(seconds, behind)
    last = seconds / max(job.model.layers / layout.pipeline, 1)
    exposed = max(seconds - behind, 0.0) + min(last, seconds) + _CONTENTION * hidden
    return exposed, link


def _update(job: Job, layout: Layout, cluster: Cluster) -> float:
    """Seconds of the optimizer: what it reads and writes of the parameters whose state this rank has."""
    device = cluster.device
    held = _held_parameters(job.model, layout)
    if layout.zero and layout.shard > 1:
        held /= layout.shard * layout.context
    return held * job.software.optimizer_bytes / (device.bandwidth * device.efficiency.bandwidth)


def _held_parameters(model: Transformer, layout: Layout) -> float:
    """Parameters of the rank with most of them, before data ranks share them out."""
    ends = model.embedding_parameters
    if layout.pipeline == 1:
        ends += model.head_parameters
    layers = ceil(model.layers / layout.pipeline)
    return (layers * model.layer_parameters + ends) / layout.tensor


def _data_group(layout: Layout, names: Sequence[str]) -> Group:
    """The ranks that reduce the same gradients: several axes as one group, with the stride of the innermost."""
    all_groups = groups(layout)
    size, stride = 1, None
    for name in reversed(layout.placement):
        if name in names and all_groups[name].size > 1:
            size *= all_groups[name].size
            stride = all_groups[name].stride if stride is None else stride
    return Group(size=size, stride=stride or 1)


def _piece(job: Job, layout: Layout, micro_batch: int) -> Piece:
    return Piece(
        micro_batch=micro_batch,
        tokens=ceil(job.model.seq / layout.context),
        tensor=layout.tensor,
        split=layout.sequence == "split",
    )


def _layer_time(job: Job, layout: Layout, micro_batch: int, cluster: Cluster) -> LayerTime:
    piece = _piece(job, layout, micro_batch)
    forward, recomputation, backward = _layer_work(
        job.model, piece, job.software, cluster.device, job.precision, layout.recompute
    )
    exposed = [0.0, 0.0]
    all_groups = groups(layout)
    if layout.tensor > 1:
        size = 2.0 * micro_batch * piece.tokens * job.model.hidden
        # Two all-reduces a direction; with split sequences each is an all-gather and a reduce-scatter.
        if layout.sequence == "split":
            group = all_groups["tensor"]
            once = collectives.all_gather(size, group, cluster) + collectives.reduce_scatter(size, group, cluster)
        else:
            once = collectives.all_reduce(size, all_groups["tensor"], cluster)
        seen = 1 - job.software.tensor_overlap
        exposed = [2 * once * seen, 2 * once * seen]
    if layout.context > 1:
        kv = 2 * 2.0 * micro_batch * piece.tokens * job.model.kv_heads * job.model.head_dim / layout.tensor
        around = (layout.context - 1) * collectives.send(kv, all_groups["context"], cluster)
        exposed[0] += max(around - forward.attention_seconds, 0.0)
        exposed[1] += max(2 * around - backward.attention_seconds, 0.0)
    return LayerTime(
        forward=forward,
        recomputation=recomputation,
        backward=backward,
        forward_exposed=exposed[0],
        backward_exposed=exposed[1],
    )


@lru_cache(maxsize=4096)
def _layer_work(
    model: Transformer, piece: Piece, software: Software, device: Device, precision: str, recompute: str
) -> tuple[Work, Work, Work]:
    return (
        operators.work_of(operators.layer_forward(model, piece, software), device, software, precision),
        operators.work_of(
            operators.layer_recomputation(model, piece, software, recompute), device, software, precision
        ),
        operators.work_of(operators.layer_backward(model, piece, software), device, software, precision),
    )


@lru_cache(maxsize=4096)
def _head(model: Transformer, piece: Piece, software: Software, device: Device, precision: str) -> tuple[Work, Work]:
    return (
        operators.work_of(operators.head_forward(model, piece, software), device, software, precision),
        operators.work_of(operators.head_backward(model, piece, software), device, software, precision),
    )


@lru_cache(maxsize=4096)
def _embedding(model: Transformer, piece: Piece, software: Software, device: Device, precision: str) -> Work:
    return operators.work_of(operators.embedding(model, piece), device, software, precision)


def _parts(
    job: Job, layout: Layout, layer: LayerTime, micro_batches: int, stages: Sequence[StageTimes], gathered: float
) -> dict[str, float]:
    """Seconds of a step on the busiest rank, by what bounds them; scaled to the step's time by the caller."""
    layers = ceil(job.model.layers / layout.pipeline)
    work = Work().combined(layer.backward, layers).combined(layer.forward, layers)
    traffic = layers * (layer.backward_exposed + layer.forward_exposed)
    work = work.combined(layer.recomputation, layers)
    traffic += layers * layer.forward_exposed * (layout.recompute == "full")
    parts = {
        "matrix products": work.matmul_seconds,
        "attention": work.attention_seconds,
        "memory bandwidth": work.memory_seconds,
        "tensor and context traffic": traffic,
        "gathering parameters": gathered,
    }
    if work.host_seconds > work.seconds + traffic:
        parts = {"host issuing operators": work.host_seconds}
    return {name: micro_batches * seconds for name, seconds in parts.items()}


def with_micro_batches(job: Job, layout: Layout) -> list[int]:
    """Micro-batch sizes that divide a data rank's samples: powers of two up to 64, and all of them."""
    samples = max(1, job.global_batch // layout.data_ranks)
    sizes = {2**power for power in range(7) if samples % 2**power == 0}
    return sorted(size for size in sizes if samples // size >= layout.pipeline) or [1]


def whole_sequence(job: Job, seq: int) -> Job:
    """The same job on samples of another length."""
    return replace(job, model=replace(job.model, seq=seq))
