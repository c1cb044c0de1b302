"""What a training program does with the same model: which kernels it fuses, what it overlaps, in what it reduces."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

Attention = Literal["unfused", "flash-1", "flash-2", "cudnn"]


@dataclass(frozen=True, kw_only=True)
class Software:
    """The parts of a training program that its time depends on."""

    name: str
    attention: Attention
    splits_sequence: bool = False  # between its slices tensor parallel splits the tokens, too (arXiv 2205.05198)
    tensor_overlap: float = 0.0  # part of tensor parallel's traffic that runs behind matrix products
    overlaps_gradients: bool = False  # their reduction runs during the backward
    gradient_bytes: int = 2  # of a gradient on the wire
    loss_bytes: float = 52  # traffic a logit: casts to fp32 and every pass of softmax and its gradient
    optimizer_bytes: float = 36  # traffic a parameter of a step
    launches: float = 1.0  # operators issued for each one that is counted: casts, views and checks beside it
    kept_gradient_bytes: float = 2  # of a gradient between micro-batches
    fused_gate: bool = False  # a gated activation is one kernel, which keeps its inputs alone
    shards_over_context: bool = False  # the optimizer's state is shared by context parallel's ranks, too
    zero_stages: tuple[int, ...] = (0, 1, 2, 3)  # that it has
    splits_twice: bool = True  # a pipeline's tokens go over context parallel's ranks and again between slices
    sends_slices: bool = False  # each slice sends its part of what stages hand on (arXiv 2104.04473, section 4.1)
    zero_bubble: bool = False  # its pipelines have schedules that compute gradients of weights apart
    offloads: bool = False  # it can keep activations, optimizer state and shards in the host's memory
    recompute_stops_early: bool = False  # a layer's last product is not computed again: nothing needs its result
    source: str = ""


SOFTWARE: Mapping[str, Software] = {
    software.name: software
    for software in (
        # Attention of three kernels with a fused scale-mask-softmax; all-reduces between slices; gradients reduced
        # after the backward, in fp16 (arXiv 2104.04473; NVIDIA/Megatron-LM v2.x).
        Software(
            name="megatron-2021", attention="unfused", launches=2.1, sends_slices=True,
            source="arXiv 2104.04473; NVIDIA/Megatron-LM v2",
        ),
        # The same a year later: gradients are added up in fp32, 18 bytes a parameter with Adam's state (figure 1).
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
        # What samestep runs: PyTorch's attention kernel, overlap by FSDP2 and DDP.
        Software(
            name="samestep", attention="flash-2", overlaps_gradients=True, loss_bytes=44, recompute_stops_early=True,
            splits_twice=False, zero_bubble=True, offloads=True,
            source="samestep",
        ),
    )
}  # fmt: skip

# Those that a plan can be made for. Megatron-core adds up and reduces gradients in fp32 where it trains for good
# (`accumulate_allreduce_grads_in_fp32`, also in arXiv 2407.21783, section 3.3.2); its benchmarks do it in bf16.
PLANNED: Mapping[str, Software] = {
    "samestep": SOFTWARE["samestep"],
    "megatron-core": replace(SOFTWARE["megatron-core"], gradient_bytes=4, kept_gradient_bytes=4),
}
