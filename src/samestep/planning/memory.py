"""Computes, from shapes, each pipeline rank's memory: parameters, gradients, optimizer state, activations, buffers.

Activations follow Korthikanti et al. (arXiv 2205.05198, section 4), but are counted tensor by tensor instead of by
their closed form, which also covers gated, grouped and flash variants. Parameters, gradients and optimizer state
follow ZeRO's table (Rajbhandari et al., arXiv 1910.02054, figure 1): 2 + 2 + 12 bytes per parameter, divided over the
ranks according to the ZeRO stage.
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
from samestep.planning.stage_time import PlannedJob, layer_parameters, layers_of_stages

_RUNTIME = 1.5 * 2**30  # bytes: the device's context, libraries' workspaces, NCCL's channels
_USABLE = 0.94  # fraction of a device's memory
_FRAGMENTS = 0.03  # fraction of allocated memory lost to fragmentation
_OPTIMIZER_STATE = 12.0  # bytes per parameter: fp32 weight and Adam's two moments
_GATHERED_LAYERS = 2  # layers whose parameters are gathered at a time: the current one and the next


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes on each device of one pipeline rank, at the step's peak."""

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
    """Whether every rank fits in the device's memory, with a margin for other libraries and temporary tensors."""
    return max(rank.total for rank in memory) <= _USABLE * device.memory


def memory_of(job: PlannedJob, layout: Layout, micro_batch: int) -> list[RankMemory]:
    """The memory of every pipeline rank, first to last.

    Activations are those of one micro-batch in one layer, times the rank's layers, times the micro-batches whose
    backward has not run yet (`in_flight`): under 1F1B, stage s of p holds p - s of them. A search asks for thousands
    of layouts, so what ranks have in common is computed once.
    """
    model = job.model
    owner = pipeline_events.owners(layout.schedule, layout.pipeline, layout.stages_a_rank)
    if layout.pipeline == 1:
        owner = [0]
    micro_batches = max(1, ceil(job.global_batch / (layout.data_ranks * micro_batch)))
    layers = layers_of_stages(model.layers, len(owner))
    counts = [0] * layout.pipeline
    for stage, rank in enumerate(owner):
        counts[rank] += layers[stage]
    kept = kept_activations(model, micro_batch, layout, job.software, job.precision)
    recomputed = 0.0
    if layout.recompute != "none":
        recomputed = whole_activations(model, micro_batch, layout, job.software, job.precision) - kept
    # Logits in 16 bits and in fp32, and their gradient in 16 bits.
    logits = micro_batch * ceil(model.seq / layout.context) * ceil(model.vocab / layout.tensor) * 8.0
    buffers = _RUNTIME + _gathered(model, layout, job.software)
    held: dict[tuple[int, bool, bool], tuple[float, float, float]] = {}
    ranks = []
    for rank, count in enumerate(counts):
        part = count, rank == owner[0], rank == owner[-1]
        if part not in held:
            held[part] = _held(job, layout, *part)
        # Layers times micro-batches, since a rank with several stages holds different numbers of each.
        at_once = in_flight(layout, micro_batches, rank, tuple(layers))
        activations = at_once * kept + recomputed
        if layout.offloads("activations"):
            activations -= max(at_once - 2, 0) * kept
        ranks.append(_rank_memory(held[part], activations + (logits if rank == owner[-1] else 0.0), buffers))
    return ranks


def _held(job: PlannedJob, layout: Layout, layers: int, first: bool, last: bool) -> tuple[float, float, float]:
    """Bytes of weights, gradients and optimizer state of a pipeline rank with so many layers."""
    shared, experts = held_parameters(job.model, layout, layers, first=first, last=last)
    # Parameters outside experts are sharded over the expert axis as well.
    of_shared = state_bytes(shared, layout, job.software, further=layout.expert)
    of_experts = state_bytes(experts, layout, job.software)
    weights, gradients, state = (one + other for one, other in zip(of_shared, of_experts, strict=True))
    return weights, gradients * job.model.trained, state * job.model.trained


def _rank_memory(held: tuple[float, float, float], activations: float, buffers: float) -> RankMemory:
    weights, gradients, state = held
    return RankMemory(
        parameters=weights,
        gradients=gradients,
        optimizer=state,
        activations=activations,
        buffers=buffers + _FRAGMENTS * (weights + gradients + state + activations),
    )


def held_parameters(
    model: Transformer, layout: Layout, layers: int, *, first: bool, last: bool
) -> tuple[float, float]:
    """Parameters of one tensor slice of a pipeline rank's layers, embedding and head; and those of its experts."""
    shared, experts = (layers * parameters for parameters in layer_parameters(model, layout))
    count = shared * layout.tensor
    if first:
        count += model.embedding_parameters
    if last and not (first and model.tied):
        count += model.hidden * model.vocab + model.hidden
    return count / layout.tensor, experts


def state_bytes(
    parameters: float, layout: Layout, software: Software, *, further: int = 1
) -> tuple[float, float, float]:
    """Bytes of weights, gradients and optimizer state of one rank, by the ZeRO stage.

    Megatron-LM's distributed optimizer shards its state over the context axis as well. `further`: size of another
    axis over which they are sharded besides the shard axis.
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
    """Bytes of weights and optimizer state that one rank offloads to the host, for a layout without a pipeline."""
    parameters = model.parameters / layout.tensor
    state = parameters * model.trained * _OPTIMIZER_STATE / (layout.shard if layout.zero >= 1 else 1)
    if layout.offloads_parameters:
        return state + 2.0 * parameters / (layout.shard if layout.zero >= 3 else 1)
    return state if layout.offloads("optimizer") else 0.0


def whole_activations(
    model: Transformer, micro_batch: int, layout: Layout, software: Software, precision: str = "bf16"
) -> float:
    """Bytes of one layer's activations of a micro-batch, saved for the backward without recomputation.

    For GPT in 16 bits with dropout: s b h (10 + 24 / t + 5 a s / (h t)), all divided by t with sequence parallel
    (arXiv 2205.05198, equations 2 and 4). In fp8 the inputs of matrix products have one byte per element, and
    attention's output is saved a second time.
    """
    unit = float(micro_batch * ceil(model.seq / layout.context) * model.hidden)
    low = precision in ("fp8", "fp4")
    input_bytes = 1.0 if low else 2.0  # bytes per element of a matrix product's input
    shared = unit * (
        4.0 + 2 * input_bytes + (2.0 if model.dropout else 0.0)
    )  # norms' inputs and outputs, dropout masks
    if layout.sequence == "split":
        shared /= layout.tensor
    # Queries, keys, values, and attention's output.
    inner = unit * 2.0 * (model.qkv_width + model.attention_width) / model.hidden
    inner += unit * (1.0 if low else 0.0) * model.attention_width / model.hidden
    # The activation's input and output; with a gate, its factor as well unless they are one kernel.
    wide = (2.0 * model.ffn_in_width + input_bytes * model.ffn) / model.hidden
    if model.gated and not software.fused_gate:
        wide += 2.0 * model.ffn / model.hidden
    if model.experts > 1:
        wide += 4.0  # the experts' inputs and outputs, in expert order
    inner += unit * model.active_experts * wide
    if software.attention == "unfused":
        inner += attention_scores(model, micro_batch)
    return shared + inner / layout.tensor


def attention_scores(model: Transformer, micro_batch: int) -> float:
    """Bytes of scores that unfused attention saves: 5 a s² b with dropout (arXiv 2205.05198)."""
    return (5.0 if model.dropout else 2.0) * model.heads * model.seq**2 * micro_batch


def kept_activations(
    model: Transformer, micro_batch: int, layout: Layout, software: Software, precision: str = "bf16"
) -> float:
    """Bytes of one layer's activations of a micro-batch between its forward and its backward, with recomputation."""
    whole = whole_activations(model, micro_batch, layout, software, precision)
    unit = 2.0 * micro_batch * ceil(model.seq / layout.context) * model.hidden
    if layout.recompute == "full":
        return unit / (layout.tensor if layout.sequence == "split" else 1)
    if layout.recompute == "none":
        return whole
    if software.attention == "unfused":
        return whole - attention_scores(model, micro_batch) / layout.tensor
    # The layer's input, and the outputs of its matrix products and of attention.
    shared = 3 * unit / (layout.tensor if layout.sequence == "split" else 1)
    products = unit * (model.qkv_width + model.attention_width) / model.hidden
    products += unit * model.active_experts * model.ffn_in_width / model.hidden
    return shared + products / layout.tensor


def in_flight(layout: Layout, micro_batches: int, rank: int, layers: tuple[int, ...]) -> int:
    """Layers whose activations a pipeline rank holds at its peak, summed over micro-batches, by its schedule's order.

    If the schedule splits the backward, activations are held until the weight gradients are computed: those of as
    many micro-batches as there are pipeline ranks, in each of a rank's stages.
    """
    if layout.pipeline == 1:
        return sum(layers)
    if layout.schedule in pipeline_events.SPLIT_BACKWARD:
        owner = pipeline_events.owners(layout.schedule, layout.pipeline, layout.stages_a_rank)
        own = sum(count for count, at in zip(layers, owner, strict=True) if at == rank)
        return min(layout.pipeline, micro_batches) * own
    number = min(micro_batches, 4 * layout.pipeline)  # with more micro-batches, the peak stays the same
    if layout.schedule == "gpipe":
        number = micro_batches
    elif layout.schedule != "1f1b":
        number = max(number // layout.pipeline, 1) * layout.pipeline
    return _peaks(layout.schedule, layout.pipeline, layout.stages_a_rank, number, layers)[rank]


@lru_cache(maxsize=4096)
def _peaks(
    schedule: str, ranks: int, stages_a_rank: int, micro_batches: int, layers: tuple[int, ...]
) -> tuple[int, ...]:
    """The most layers held at once by each pipeline rank; cached by the only sizes that it depends on."""
    made = pipeline_events.orders(schedule, ranks=ranks, stages_a_rank=stages_a_rank, micro_batches=micro_batches)
    peaks = []
    for order in made:
        held = peak = 0
        for stage, kind, _ in order:
            if kind == "F":
                held += layers[stage]
                if held > peak:
                    peak = held
            else:
                held -= layers[stage]
        peaks.append(peak)
    return tuple(peaks)


def _gathered(model: Transformer, layout: Layout, software: Software) -> float:
    """Bytes of the parameters that ZeRO-3 gathers at a time, and of an unsharded gradient to be reduce-scattered."""
    if layout.zero < 3 or layout.shard == 1:
        return 0.0
    layer = sum(layer_parameters(model, layout))
    ends = model.embedding_parameters / layout.tensor
    return 2.0 * max(_GATHERED_LAYERS * layer, ends) + software.gradient_bytes * model.trained * max(layer, ends)
