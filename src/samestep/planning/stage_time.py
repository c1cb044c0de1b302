"""The time of one micro-batch in each stage of a pipeline: its layers' work, and traffic that nothing hides."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil

from samestep.layout import Layout
from samestep.planning import collectives, operators
from samestep.planning.collectives import Group
from samestep.planning.hardware import Cluster, Device
from samestep.planning.operators import Piece, Work
from samestep.planning.pipeline_events import StageTimes
from samestep.planning.shapes import Transformer
from samestep.planning.software import Software

# Kernels of a collective take some of the processors that products could use (arXiv 2305.06942, section 3: NCCL runs
# in 2 to 24 blocks of 108): of the time in which both run, so much is lost to products.
CONTENTION = 0.1

_LAUNCHES_OF_SLICES = 6  # operators issued for tensor parallel's collectives, a layer and direction

# The part of a backward that computes gradients of weights: of each product's two, one.
_WEIGHTS, _WEIGHTS_RECOMPUTED = 0.45, 0.3


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


def data_group(layout: Layout, names: Sequence[str]) -> Group:
    """The ranks that reduce the same gradients: several axes as one group, with the stride of the innermost."""
    all_groups = groups(layout)
    size, stride = 1, None
    for name in reversed(layout.placement):
        if name in names and all_groups[name].size > 1:
            size *= all_groups[name].size
            stride = all_groups[name].stride if stride is None else stride
    return Group(size=size, stride=stride or 1)


@dataclass(frozen=True, kw_only=True)
class Stages:
    """The times of a pipeline's stages, or of the whole model as one."""

    layer: LayerTime
    times: Sequence[StageTimes]
    gathering: float  # seconds a micro-batch that gathering parameters adds to them


def stages_of(job: Job, layout: Layout, micro_batch: int, cluster: Cluster) -> Stages:
    """The time of each stage's micro-batch: its layers, the embedding in the first one, the head in the last one."""
    count = layout.pipeline * layout.stages_a_rank if layout.pipeline > 1 else 1
    piece = _piece(job, layout, micro_batch)
    layer = _layer_time(job, layout, micro_batch, cluster)
    send = 0.0
    if count > 1:
        size = 2.0 * micro_batch * piece.tokens * job.model.hidden
        if layout.sequence == "split" or job.software.sends_slices:
            size /= layout.tensor
        send = collectives.send(size, groups(layout)["pipeline"], cluster)
    found, gathering = [], 0.0
    for index, layers in enumerate(layers_of_stages(job.model.layers, count)):
        first, last = index == 0, index == count - 1
        seconds = []
        for backward in (False, True):
            each, added = _stage(
                job, layout, cluster, layer, piece, layers, first=first, last=last, backward=backward
            )
            seconds.append(each)
            gathering += added
        weights = seconds[1] * (_WEIGHTS if layout.recompute == "none" else _WEIGHTS_RECOMPUTED)
        found.append(StageTimes(forward=seconds[0], backward=seconds[1], weights=weights, send=send))
    return Stages(layer=layer, times=found, gathering=gathering)


def layers_of_stages(layers: int, stages: int) -> list[int]:
    """How many layers each stage has: as even as can be, fewer beside the embedding and the head."""
    each, more = divmod(layers, stages)
    counts = [each] * stages
    middle = [*range(1, stages - 1), 0, stages - 1] if stages > 2 else list(range(stages))
    for index in middle[:more]:
        counts[index] += 1
    return counts


def _stage(
    job: Job,
    layout: Layout,
    cluster: Cluster,
    layer: LayerTime,
    piece: Piece,
    layers: int,
    *,
    first: bool,
    last: bool,
    backward: bool,
) -> tuple[float, float]:
    """Seconds of one direction of a stage, and how many of them gathering parameters adds."""
    context = (job.model, piece, job.software, cluster.device, job.precision)
    work, exposed = layer.direction(backward=backward)
    work, traffic = Work().combined(work, layers), layers * exposed
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
    """Parameters of one layer on one rank before shards: what all data ranks share, and the rank's experts."""
    if model.experts == 1:
        return model.layer_parameters / layout.tensor, 0.0
    experts = model.experts * model.expert_parameters
    return (model.layer_parameters - experts) / layout.tensor, experts / (layout.tensor * layout.expert)


def _shard_traffic(
    job: Job, layout: Layout, cluster: Cluster, layers: int, *, ends: bool, backward: bool
) -> tuple[float, float]:
    """Seconds of gathering parameters and scattering gradients of a stage, and the part before it computes.

    ZeRO-3 and FSDP gather each layer before its forward and its backward, and scatter its gradients after it; ZeRO-2
    does the latter alone.
    """
    if layout.zero < 2 or layout.shard == 1 or (layout.zero == 2 and not backward):
        return 0.0, 0.0
    model, group = job.model, data_group(layout, ("shard", "context"))
    each = 2.0 * sum(layer_parameters(model, layout))
    outer = 2.0 * model.embedding_parameters / layout.tensor if ends else 0.0
    one = collectives.all_gather(each, group, cluster)
    gathered = layers * one + collectives.all_gather(outer, group, cluster)
    if not backward:
        return gathered, one
    wire = job.software.gradient_bytes / 2 * model.trained
    return (wire if layout.zero == 2 else 1 + wire) * gathered, one * wire


def _layer_time(job: Job, layout: Layout, micro_batch: int, cluster: Cluster) -> LayerTime:
    """Forward, recomputation and backward of a layer for one micro-batch, with the messages that nothing hides."""
    piece = _piece(job, layout, micro_batch)
    forward, recomputation, backward = _layer_work(
        job.model, piece, job.software, cluster.device, job.precision, layout.recompute
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
    job: Job, layout: Layout, micro_batch: int, cluster: Cluster, forward: Work, backward: Work
) -> tuple[float, float]:
    """Seconds of traffic in a layer's forward and backward, of tensors, context and experts, that nothing hides."""
    joined = groups(layout)
    tokens = ceil(job.model.seq / layout.context)
    once = around = 0.0
    if layout.expert > 1:
        # Tokens go to the ranks of their experts and come back, in each direction.
        size = 2.0 * micro_batch * tokens * job.model.hidden * job.model.active_experts / layout.tensor
        once += 2 * collectives.all_to_all(size, joined["expert"], cluster)
    if layout.tensor > 1:
        size, group = 2.0 * micro_batch * tokens * job.model.hidden, joined["tensor"]
        # Two all-reduces a direction; with split sequences each is an all-gather and a reduce-scatter, and the
        # backward's further all-gather runs behind the gradients of weights (arXiv 2205.05198, section 4.2.2).
        if layout.sequence == "split":
            slices = collectives.all_gather(size, group, cluster) + collectives.reduce_scatter(size, group, cluster)
        else:
            slices = collectives.all_reduce(size, group, cluster)
        once += 2 * (1 - job.software.tensor_overlap) * slices
    if layout.context > 1:
        # Keys and values go around the ring while attention computes with those that are there.
        size = 2 * 2.0 * micro_batch * tokens * job.model.kv_heads * job.model.head_dim / layout.tensor
        around = (layout.context - 1) * collectives.send(size, joined["context"], cluster)
    return (
        once + max(around - forward.attention_seconds, 0.0),
        once + max(2 * around - backward.attention_seconds, 0.0),
    )


@lru_cache(maxsize=4096)
def _layer_work(
    model: Transformer, piece: Piece, software: Software, device: Device, precision: str, recompute: str
) -> tuple[Work, Work, Work]:
    """Work of a layer's kernels: forward, what is computed again, backward."""
    return (
        operators.work_of(operators.layer_forward(model, piece, software), device, software, precision),
        operators.work_of(
            operators.layer_recomputation(model, piece, software, recompute), device, software, precision
        ),
        operators.work_of(operators.layer_backward(model, piece, software), device, software, precision),
    )


@lru_cache(maxsize=4096)
def _head(model: Transformer, piece: Piece, software: Software, device: Device, precision: str) -> tuple[Work, Work]:
    """Work of the output layer and the loss: forward, backward."""
    return (
        operators.work_of(operators.head_forward(model, piece, software), device, software, precision),
        operators.work_of(operators.head_backward(model, piece, software), device, software, precision),
    )


@lru_cache(maxsize=4096)
def _embedding(model: Transformer, piece: Piece, software: Software, device: Device, precision: str) -> Work:
    return operators.work_of(operators.embedding(model, piece), device, software, precision)


def _piece(job: Job, layout: Layout, micro_batch: int) -> Piece:
    """What one rank computes of a layer: its samples, its tokens, its slice."""
    return Piece(
        micro_batch=micro_batch,
        tokens=ceil(job.model.seq / layout.context),
        tensor=layout.tensor,
        split=layout.sequence == "split",
        expert=layout.expert,
    )
