"""The time of one micro-batch in each pipeline stage: its layers' compute, and exposed communication."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil

from samestep.layout import Layout
from samestep.planning import collectives, operators
from samestep.planning.collectives import RankGroup
from samestep.planning.hardware import ClusterSpec, Device
from samestep.planning.operators import DevicePart, OperatorTimes
from samestep.planning.pipeline_events import StageTimes
from samestep.planning.shapes import Transformer
from samestep.planning.software import Software

# Slowdown of compute while a collective overlaps it, as a fraction of the overlap: its kernels occupy some of the
# processors (arXiv 2305.06942, section 3: NCCL runs in 2 to 24 blocks of 108).
CONTENTION = 0.1

_LAUNCHES_OF_SLICES = 6  # operators launched for tensor parallel's collectives, per layer and direction

# The fraction of a backward that computes weight gradients (one of each product's two), without and with
# recomputation.
_WEIGHTS, _WEIGHTS_RECOMPUTED = 0.45, 0.3


@dataclass(frozen=True, kw_only=True)
class PlannedJob:
    """The model, batch and precision of a step, and the program that runs it."""

    model: Transformer
    global_batch: int  # samples
    precision: str
    software: Software

    @property
    def tokens(self) -> int:
        return self.global_batch * self.model.seq


@dataclass(frozen=True, kw_only=True)
class LayerTime:
    """The time of one layer for one micro-batch on one device: compute and exposed communication."""

    forward: OperatorTimes
    recomputation: OperatorTimes
    backward: OperatorTimes
    forward_exposed: float  # seconds of communication that does not overlap compute
    backward_exposed: float

    def direction(self, *, backward: bool) -> tuple[OperatorTimes, float]:
        return (self.backward, self.backward_exposed) if backward else (self.forward, self.forward_exposed)


def groups(layout: Layout) -> Mapping[str, RankGroup]:
    """The group of each mesh axis: its size, and the stride of its ranks in the layout's placement order."""
    by_name: dict[str, RankGroup] = {}
    stride = 1
    for name in reversed(layout.placement):
        size = getattr(layout, name)
        by_name[name] = RankGroup(size=size, stride=stride)
        stride *= size
    return by_name


def data_group(layout: Layout, names: Sequence[str]) -> RankGroup:
    """Several mesh axes as one group, such as the ranks that reduce a gradient; its stride is the innermost's."""
    all_groups = groups(layout)
    size, stride = 1, None
    for name in reversed(layout.placement):
        if name in names and all_groups[name].size > 1:
            size *= all_groups[name].size
            stride = all_groups[name].stride if stride is None else stride
    return RankGroup(size=size, stride=stride or 1)


@dataclass(frozen=True, kw_only=True)
class PlannedStages:
    """The times of a pipeline's stages; without a pipeline, the whole model is one stage."""

    layer: LayerTime
    times: Sequence[StageTimes]
    gathering: float  # seconds per micro-batch that all-gathers of parameters add, summed over stages


def stages_of(job: PlannedJob, layout: Layout, micro_batch: int, cluster: ClusterSpec) -> PlannedStages:
    """Compute the time of each stage: its layers, with the embedding in the first and the head in the last."""
    count = layout.pipeline * layout.stages_a_rank if layout.pipeline > 1 else 1
    part = _part(job, layout, micro_batch)
    layer = _layer_time(job, layout, micro_batch, cluster)
    send = 0.0
    if count > 1:
        size = 2.0 * micro_batch * part.tokens * job.model.hidden
        if layout.sequence == "split" or job.software.sends_slices:
            size /= layout.tensor
        send = collectives.send(size, groups(layout)["pipeline"], cluster)
    stages, gathering = [], 0.0
    for index, layers in enumerate(layers_of_stages(job.model.layers, count)):
        first, last = index == 0, index == count - 1
        seconds = []
        for backward in (False, True):
            seconds_of_pass, added = _stage(
                job, layout, cluster, layer, part, layers, first=first, last=last, backward=backward
            )
            seconds.append(seconds_of_pass)
            gathering += added
        weights = seconds[1] * (_WEIGHTS if layout.recompute == "none" else _WEIGHTS_RECOMPUTED)
        stages.append(StageTimes(forward=seconds[0], backward=seconds[1], weights=weights, send=send))
    return PlannedStages(layer=layer, times=stages, gathering=gathering)


def layers_of_stages(layers: int, stages: int) -> list[int]:
    """The number of layers of each stage: as even as possible; inner stages get the extra layers first."""
    fewest, more = divmod(layers, stages)
    counts = [fewest] * stages
    middle = [*range(1, stages - 1), 0, stages - 1] if stages > 2 else list(range(stages))
    for index in middle[:more]:
        counts[index] += 1
    return counts


def _stage(
    job: PlannedJob,
    layout: Layout,
    cluster: ClusterSpec,
    layer: LayerTime,
    part: DevicePart,
    layers: int,
    *,
    first: bool,
    last: bool,
    backward: bool,
) -> tuple[float, float]:
    """Seconds of one direction of a stage, and those of them that all-gathers of parameters add."""
    context = (job.model, part, job.software, cluster.device, job.precision)
    work, exposed = layer.direction(backward=backward)
    work, traffic = OperatorTimes().combined(work, layers), layers * exposed
    if backward:
        work = work.combined(layer.recomputation, layers)
        traffic += layers * layer.forward_exposed * (layout.recompute == "full")
    if first:
        work = work.combined(_embedding(*context), 0.6 if backward else 0.4)
    if last:
        work = work + _head(*context)[backward]
    host = work.host_seconds
    if layout.tensor > 1:
        launch = job.software.launches * cluster.device.efficiency.launch_seconds
        host += layers * _LAUNCHES_OF_SLICES * launch
    device = work.seconds + traffic
    gathering, before = _shard_traffic(job, layout, cluster, layers, ends=first or last, backward=backward)
    added = 0.0
    if gathering:
        added = CONTENTION * min(gathering, device) + max(gathering - device, 0.0) + before
    return operators.issued(device + added, host), added


def layer_parameters(model: Transformer, layout: Layout) -> tuple[float, float]:
    """Parameters of one layer on one rank before sharding: those outside experts, and those of the rank's experts."""
    if model.experts == 1:
        return model.layer_parameters / layout.tensor, 0.0
    experts = model.experts * model.expert_parameters
    return (model.layer_parameters - experts) / layout.tensor, experts / (layout.tensor * layout.expert)


def _shard_traffic(
    job: PlannedJob, layout: Layout, cluster: ClusterSpec, layers: int, *, ends: bool, backward: bool
) -> tuple[float, float]:
    """Seconds of a stage's all-gathers and reduce-scatters, and of the first or last one, which nothing overlaps.

    ZeRO-3 and FSDP all-gather each layer before its forward and its backward, and reduce-scatter its gradients;
    ZeRO-2 only reduce-scatters.
    """
    if layout.zero < 2 or layout.shard == 1 or (layout.zero == 2 and not backward):
        return 0.0, 0.0
    model, group = job.model, data_group(layout, ("shard", "context"))
    parameter_bytes = 2.0 * sum(layer_parameters(model, layout))
    outer = 2.0 * model.embedding_parameters / layout.tensor if ends else 0.0
    one = collectives.all_gather(parameter_bytes, group, cluster)
    gathered = layers * one + collectives.all_gather(outer, group, cluster)
    if not backward:
        return gathered, one
    wire = job.software.gradient_bytes / 2 * model.trained
    return (wire if layout.zero == 2 else 1 + wire) * gathered, one * wire


def _layer_time(job: PlannedJob, layout: Layout, micro_batch: int, cluster: ClusterSpec) -> LayerTime:
    """The time of a layer for one micro-batch: forward, recomputation, backward, and exposed communication."""
    part = _part(job, layout, micro_batch)
    forward, recomputation, backward = _layer_work(
        job.model, part, job.software, cluster.device, job.precision, layout.recompute
    )
    exposed = _exposed(job, layout, micro_batch, cluster, forward, backward)
    return LayerTime(
        forward=forward,
        recomputation=recomputation,
        backward=backward,
        forward_exposed=exposed[0],
        backward_exposed=exposed[1],
    )


def _exposed(
    job: PlannedJob,
    layout: Layout,
    micro_batch: int,
    cluster: ClusterSpec,
    forward: OperatorTimes,
    backward: OperatorTimes,
) -> tuple[float, float]:
    """Exposed seconds of tensor, context and expert parallel communication in a layer's forward and backward."""
    joined = groups(layout)
    tokens = ceil(job.model.seq / layout.context)
    once = around = 0.0
    if layout.expert > 1:
        # An all-to-all to the experts' ranks and one back, in forward and in backward.
        size = 2.0 * micro_batch * tokens * job.model.hidden * job.model.active_experts / layout.tensor
        once += 2 * collectives.all_to_all(size, joined["expert"], cluster)
    if layout.tensor > 1:
        size, group = 2.0 * micro_batch * tokens * job.model.hidden, joined["tensor"]
        # Two all-reduces per direction; with sequence parallel each is an all-gather and a reduce-scatter, and the
        # backward's extra all-gather overlaps the weight gradients (arXiv 2205.05198, section 4.2.2).
        if layout.sequence == "split":
            slices = collectives.all_gather(size, group, cluster) + collectives.reduce_scatter(size, group, cluster)
        else:
            slices = collectives.all_reduce(size, group, cluster)
        once += 2 * (1 - job.software.tensor_overlap) * slices
    if layout.context > 1:
        # Keys and values circulate in the ring while attention computes on those already received.
        size = 2 * 2.0 * micro_batch * tokens * job.model.kv_heads * job.model.head_dim / layout.tensor
        around = (layout.context - 1) * collectives.send(size, joined["context"], cluster)
    return (
        once + max(around - forward.attention_seconds, 0.0),
        once + max(2 * around - backward.attention_seconds, 0.0),
    )


@lru_cache(maxsize=4096)
def _layer_work(
    model: Transformer, part: DevicePart, software: Software, device: Device, precision: str, recompute: str
) -> tuple[OperatorTimes, OperatorTimes, OperatorTimes]:
    """Work of a layer's forward, recomputation and backward."""
    return (
        operators.work_of(operators.layer_forward(model, part, software), device, software, precision),
        operators.work_of(
            operators.layer_recomputation(model, part, software, recompute), device, software, precision
        ),
        operators.work_of(operators.layer_backward(model, part, software), device, software, precision),
    )


@lru_cache(maxsize=4096)
def _head(
    model: Transformer, part: DevicePart, software: Software, device: Device, precision: str
) -> tuple[OperatorTimes, OperatorTimes]:
    """Work of the output layer and the loss: forward, backward."""
    return (
        operators.work_of(operators.head_forward(model, part, software), device, software, precision),
        operators.work_of(operators.head_backward(model, part, software), device, software, precision),
    )


@lru_cache(maxsize=4096)
def _embedding(
    model: Transformer, part: DevicePart, software: Software, device: Device, precision: str
) -> OperatorTimes:
    return operators.work_of(operators.embedding(model, part), device, software, precision)


def _part(job: PlannedJob, layout: Layout, micro_batch: int) -> DevicePart:
    """One rank's part of a layer: its samples, tokens, and tensor and expert slices."""
    return DevicePart(
        micro_batch=micro_batch,
        tokens=ceil(job.model.seq / layout.context),
        tensor=layout.tensor,
        split=layout.sequence == "split",
        expert=layout.expert,
    )
