"""Memory of each pipeline rank: parameters, gradients, optimizer state, activations, buffers. From shapes alone.

Activations follow Korthikanti et al. (arXiv 2205.05198, section 4), counted tensor by tensor instead of by their
closed form, so that gated, grouped and flash variants come out as well. Parameters, gradients and optimizer state
follow ZeRO's table (Rajbhandari et al., arXiv 1910.02054, figure 1): 2 + 2 + 12 bytes a parameter, divided as the
stage says.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from math import ceil
from typing import Any

from samestep.layout import Layout
from samestep.planning import pipeline_events
from samestep.planning.hardware import Device
from samestep.planning.shapes import Transformer
from samestep.planning.software import Software
from samestep.planning.stage_time import Job, layer_parameters, layers_of_stages

_RUNTIME = 1.5 * 2**30  # bytes: the device's context, libraries' work space, NCCL's channels
_USABLE = 0.94  # of a device's memory
_FRAGMENTS = 0.03  # of what is allocated, that the allocator can't use
_OPTIMIZER_STATE = 12.0  # bytes a parameter: fp32 weight and Adam's two moments
_GATHERED_LAYERS = 2  # layers whose parameters are gathered at a time: the current one and the next


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes on the ranks of one pipeline rank, at the step's peak."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.activations + self.buffers

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "total": self.total}


def fits(memory: Sequence[RankMemory], device: Device) -> bool:
    """Whether every rank has room, with a margin for what other libraries take and for peaks between tensors."""
    return max(rank.total for rank in memory) <= _USABLE * device.memory


def memory_of(job: Job, layout: Layout, micro_batch: int) -> list[RankMemory]:
    """The memory of every pipeline rank, first to last."""
    owner = pipeline_events.owners(layout.schedule, layout.pipeline, layout.stages_a_rank)
    if layout.pipeline == 1:
        owner = [0]
    micro_batches = max(1, ceil(job.global_batch / (layout.data_ranks * micro_batch)))
    layers = layers_of_stages(job.model.layers, len(owner))
    return [_rank(job, layout, micro_batch, micro_batches, rank, owner, layers) for rank in range(layout.pipeline)]


def _rank(
    job: Job,
    layout: Layout,
    micro_batch: int,
    micro_batches: int,
    rank: int,
    owner: Sequence[int],
    layers: Sequence[int],
) -> RankMemory:
    model = job.model
    own = [index for index, at in enumerate(owner) if at == rank]
    count = sum(layers[index] for index in own)
    shared, experts = held_parameters(model, layout, count, first=0 in own, last=len(owner) - 1 in own)
    # What is no expert is shared out over the ranks of the expert axis as well.
    of_shared = state_bytes(shared, layout, job.software, further=layout.expert)
    of_experts = state_bytes(experts, layout, job.software)
    weights, gradients, state = (one + other for one, other in zip(of_shared, of_experts, strict=True))
    gradients, state = gradients * model.trained, state * model.trained
    kept = kept_activations(model, micro_batch, layout, job.software, job.precision)
    at_once = in_flight(layout, micro_batches, rank, tuple(layers))
    activations = at_once * kept
    rows = micro_batch * ceil(model.seq / layout.context)
    if layout.recompute != "none":
        activations += whole_activations(model, micro_batch, layout, job.software, job.precision) - kept
    if layout.offloads("activations"):
        activations -= max(at_once - 2, 0) * kept
    ends = 0.0
    if len(owner) - 1 in own:
        # Logits in 16 bits, in fp32, and a gradient in 16 bits.
        ends += rows * ceil(model.vocab / layout.tensor) * 8.0
    buffers = _RUNTIME + _gathered(model, layout, job.software)
    total = weights + gradients + state + activations + ends
    return RankMemory(
        parameters=weights,
        gradients=gradients,
        optimizer=state,
        activations=activations + ends,
        buffers=buffers + _FRAGMENTS * total,
    )


def held_parameters(
    model: Transformer, layout: Layout, layers: int, *, first: bool, last: bool
) -> tuple[float, float]:
    """Parameters of a pipeline rank's layers, embedding and head, of one tensor slice; and those of its experts."""
    shared, experts = (layers * each for each in layer_parameters(model, layout))
    found = shared * layout.tensor
    if first:
        found += model.embedding_parameters
    if last and not (first and model.tied):
        found += model.hidden * model.vocab + model.hidden
    return found / layout.tensor, experts


def state_bytes(
    parameters: float, layout: Layout, software: Software, *, further: int = 1
) -> tuple[float, float, float]:
    """Bytes of weights, gradients and optimizer state of one rank (ZeRO's table, by its stage).

    What Megatron-LM calls a distributed optimizer shares its state over context parallel's ranks as well. `further`
    ranks share beside those of the shard axis.
    """
    shards = layout.shard * further
    sharing = shards * (layout.context if software.shards_over_context else 1)
    weights = 2.0 * parameters / (shards if layout.zero >= 3 else 1)
    gradients = software.kept_gradient_bytes * parameters / (shards if layout.zero >= 2 else 1)
    state = _OPTIMIZER_STATE * parameters / (sharing if layout.zero >= 1 else 1)
    if layout.offloads_parameters:
        weights = 0.0
    if layout.offloads("optimizer") or layout.offloads("optimizer-disk") or layout.offloads_parameters:
        state = 0.0
    return weights, gradients, state


def offloaded_bytes(model: Transformer, layout: Layout) -> float:
    """Bytes of weights and optimizer state that a rank of a layout without a pipeline keeps in the host's memory."""
    parameters = model.parameters / layout.tensor
    state = parameters * model.trained * _OPTIMIZER_STATE / (layout.shard if layout.zero >= 1 else 1)
    if layout.offloads_parameters:
        return state + 2.0 * parameters / (layout.shard if layout.zero >= 3 else 1)
    return state if layout.offloads("optimizer") else 0.0


def whole_activations(
    model: Transformer, micro_batch: int, layout: Layout, software: Software, precision: str = "bf16"
) -> float:
    """Bytes that one layer keeps of a micro-batch for its backward, without recomputation.

    Of GPT in 16 bits with dropout: s b h (10 + 24 / t + 5 a s / (h t)), all of it divided by t where the sequence is
    split (arXiv 2205.05198, equations 2 and 4). In fp8 the inputs of products are kept in a byte, and what attention
    made is kept for itself as well.
    """
    unit = float(micro_batch * ceil(model.seq / layout.context) * model.hidden)
    low = precision in ("fp8", "fp4")
    given = 1.0 if low else 2.0  # bytes of an element that is given to a product
    shared = unit * (4.0 + 2 * given + (2.0 if model.dropout else 0.0))  # norms' inputs and outputs, dropout's masks
    if layout.sequence == "split":
        shared /= layout.tensor
    # Queries, keys, values, and what attention makes of them.
    inner = unit * 2.0 * (model.qkv_width + model.attention_width) / model.hidden
    inner += unit * (1.0 if low else 0.0) * model.attention_width / model.hidden
    # The activation's inputs and its result; with a gate, its factor as well where the kernels are apart.
    wide = (2.0 * model.ffn_in_width + given * model.ffn) / model.hidden
    if model.gated and not software.fused_gate:
        wide += 2.0 * model.ffn / model.hidden
    if model.experts > 1:
        wide += 4.0  # tokens in the order of experts, and what these make of them
    inner += unit * model.active_experts * wide
    if software.attention == "unfused":
        inner += attention_scores(model, micro_batch)
    return shared + inner / layout.tensor


def attention_scores(model: Transformer, micro_batch: int) -> float:
    """Bytes of scores that attention without a fused kernel keeps: 5 a s² b with dropout (arXiv 2205.05198)."""
    return (5.0 if model.dropout else 2.0) * model.heads * model.seq**2 * micro_batch


def kept_activations(
    model: Transformer, micro_batch: int, layout: Layout, software: Software, precision: str = "bf16"
) -> float:
    """Bytes that one layer keeps of a micro-batch between its forward and its backward."""
    whole = whole_activations(model, micro_batch, layout, software, precision)
    unit = 2.0 * micro_batch * ceil(model.seq / layout.context) * model.hidden
    if layout.recompute == "full":
        return unit / (layout.tensor if layout.sequence == "split" else 1)
    if layout.recompute == "none":
        return whole
    if software.attention == "unfused":
        return whole - attention_scores(model, micro_batch) / layout.tensor
    # The layer's input, and the results of its products and of attention.
    shared = 3 * unit / (layout.tensor if layout.sequence == "split" else 1)
    products = unit * (model.qkv_width + model.attention_width) / model.hidden
    products += unit * model.active_experts * model.ffn_in_width / model.hidden
    return shared + products / layout.tensor


def in_flight(layout: Layout, micro_batches: int, rank: int, layers: tuple[int, ...]) -> int:
    """Layers whose activations a pipeline rank keeps at its peak, summed over micro-batches: counted in its order.

    Where the backward is split, activations stay until the gradients of weights are computed: in the orders of these
    schedules, those of as many micro-batches as there are ranks, in each of a rank's stages.
    """
    if layout.pipeline == 1:
        return sum(layers)
    if layout.schedule in pipeline_events.SPLIT_BACKWARD:
        owner = pipeline_events.owners(layout.schedule, layout.pipeline, layout.stages_a_rank)
        own = sum(count for count, at in zip(layers, owner, strict=True) if at == rank)
        return min(layout.pipeline, micro_batches) * own
    number = min(micro_batches, 4 * layout.pipeline)  # more repeat the same peak
    if layout.schedule == "gpipe":
        number = micro_batches
    elif layout.schedule != "1f1b":
        number = max(number // layout.pipeline, 1) * layout.pipeline
    return _peaks(layout.schedule, layout.pipeline, layout.stages_a_rank, number, layers)[rank]


@lru_cache(maxsize=4096)
def _peaks(
    schedule: str, ranks: int, stages_a_rank: int, micro_batches: int, layers: tuple[int, ...]
) -> tuple[int, ...]:
    """Of each rank the most layers kept at once, whatever else its layout says."""
    made = pipeline_events.orders(schedule, ranks=ranks, stages_a_rank=stages_a_rank, micro_batches=micro_batches)
    found = []
    for order in made:
        held = peak = 0
        for stage, kind, _ in order:
            if kind == "F":
                held += layers[stage]
                if held > peak:
                    peak = held
            else:
                held -= layers[stage]
        found.append(peak)
    return tuple(found)


def _gathered(model: Transformer, layout: Layout, software: Software) -> float:
    """Bytes of parameters that ZeRO-3 has gathered at a time, with a gradient of the same size to be scattered."""
    if layout.zero < 3 or layout.shard == 1:
        return 0.0
    layer = sum(layer_parameters(model, layout))
    ends = model.embedding_parameters / layout.tensor
    return 2.0 * max(_GATHERED_LAYERS * layer, ends) + software.gradient_bytes * model.trained * max(layer, ends)
