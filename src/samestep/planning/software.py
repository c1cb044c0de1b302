"""Properties of training programs: which kernels they fuse, what they overlap, the dtype of gradient reduction."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

Attention = Literal["unfused", "flash-1", "flash-2", "cudnn"]


@dataclass(frozen=True, kw_only=True)
class Software:
    """The properties of a training program that determine its step time and memory."""

    name: str
    attention: Attention
    splits_sequence: bool = False  # it has sequence parallel (arXiv 2205.05198)
    tensor_overlap: float = 0.0  # fraction of tensor parallel's traffic that overlaps matrix products
    overlaps_gradients: bool = False  # gradients are reduced during the backward
    gradient_bytes: int = 2  # per element in the reduction
    loss_bytes: float = 52  # memory traffic per logit: casts to fp32, and all passes of softmax and its gradient
    optimizer_bytes: float = 36  # memory traffic per parameter and step
    launches: float = 1.0  # operators launched per counted one, as there are casts, views and checks
    kept_gradient_bytes: float = 2  # per gradient element, accumulated over micro-batches
    fused_gate: bool = False  # a gated activation is one kernel, which saves only its inputs
    shards_over_context: bool = False  # the optimizer's state is also sharded over context parallel ranks
    zero_stages: tuple[int, ...] = (0, 1, 2, 3)  # that it supports
    splits_twice: bool = True  # it combines pipeline, context and sequence parallel
    sends_slices: bool = False  # each tensor rank sends its part of a stage's output (arXiv 2104.04473, section 4.1)
    zero_bubble: bool = False  # it has schedules that compute weight gradients separately
    offloads: bool = False  # it can offload activations, optimizer state and shards to the host
    recompute_stops_early: bool = False  # recomputation omits a layer's last product, whose result is not needed
    source: str = ""


SOFTWARE: Mapping[str, Software] = {
    software.name: software
    for software in (
        # Unfused attention with a fused scale-mask-softmax; tensor parallel by all-reduces; gradients reduced after
        # the backward, in fp16 (arXiv 2104.04473; NVIDIA/Megatron-LM v2.x).
        Software(
            name="megatron-2021", attention="unfused", launches=2.1, sends_slices=True,
            source="arXiv 2104.04473; NVIDIA/Megatron-LM v2",
        ),
        # The same a year later: gradients are accumulated in fp32; 18 bytes per parameter with Adam's state (figure
        # 1).
        Software(
            name="megatron-2022", attention="unfused", launches=2.1, sends_slices=True, kept_gradient_bytes=4,
            source="arXiv 2205.05198",
        ),
        # FSDP with flash attention, PyTorch's own elementwise kernels and a fused cross-entropy.
        Software(
            name="fsdp-2023", attention="flash-1", overlaps_gradients=True,
            recompute_stops_early=True, source="mosaicml/llm-foundry 2023",
        ),
        # Megatron-core with Transformer Engine: cuDNN's attention, sequence parallel, overlap of all three axes.
        Software(
            name="megatron-core", attention="cudnn", splits_sequence=True, tensor_overlap=0.7,
            shards_over_context=True, fused_gate=True, zero_stages=(0, 1, 3),
            overlaps_gradients=True, loss_bytes=44,
            source="NVIDIA/dgxc-benchmarking v25.03; NVIDIA/Megatron-LM core",
        ),
        # samestep itself: PyTorch's attention kernel, overlap by FSDP2 and DDP.
        Software(
            name="samestep", attention="flash-2", overlaps_gradients=True, loss_bytes=44, recompute_stops_early=True,
            splits_twice=False, zero_bubble=True, offloads=True,
            source="samestep",
        ),
    )
}  # fmt: skip

# Programs for which a plan can be made. In real trainings Megatron-core accumulates and reduces gradients in fp32
# (`accumulate_allreduce_grads_in_fp32`, also in arXiv 2407.21783, section 3.3.2); its benchmarks do so in bf16.
PLANNED: Mapping[str, Software] = {
    "samestep": SOFTWARE["samestep"],
    "megatron-core": replace(SOFTWARE["megatron-core"], gradient_bytes=4, kept_gradient_bytes=4),
}
