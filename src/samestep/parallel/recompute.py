"""Recomputation: blocks forget their activations after forward and compute them again in backward.

(Chen et al. 2016; selective: Korthikanti et al. 2022, section 5.)

`ForwardContext.keep` goes around what is run again: dropout finds the same samples and running numbers of draws, and
batch norm leaves its running statistics alone.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from samestep.layout import Layout, Recompute
from samestep.parallel.attributes import wrap_forward
from samestep.parallel.exact.forward_context import ForwardContext

_aten = torch.ops.aten

# What selective recomputation keeps: matrix products, which are dear to compute for what they weigh.
_KEPT = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._scaled_dot_product_fused_attention_overrideable.default,  # of devices without a name in PyTorch
    }
)


def recompute(blocks: Sequence[nn.Module], how: Recompute, now: ForwardContext) -> None:
    """Make each block recompute all of its activations ("full"), or all but matrix products ("selective").

    "full" keeps the inputs of a block alone: its activations are there for the time of its backward. "selective" also
    keeps what products and attention gave, so what is run again is norms, activations and the like: cheap, and most
    of the memory.
    """
    for block in blocks:
        # The forward is replaced rather than the module, so that every parameter keeps its name.
        wrap_forward(block, partial(_recomputed, now, _CONTEXTS[how]))


def in_graph(blocks: Sequence[nn.Module], layout: Layout) -> bool:
    """Whether the compiler takes selective recomputation over.

    What `recompute` keeps are operators that a block calls, and a compiled block calls none. Traced as a part of the
    block, the policy tells the compiler what to keep. Nothing of ours may be in the block then that has a state:
    messages of tensor and context parallelism, batch norm's statistics. There the whole block is computed again.
    """
    if layout.recompute != "selective" or layout.tensor > 1 or layout.context > 1:
        return False
    parts = (part for block in blocks for part in block.modules())
    return not any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in parts)


def selectively(forward: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """What `recompute` makes of a forward, for the compiler: it runs Python once, so that no state comes back."""
    return checkpoint(forward, *arguments, use_reentrant=False, **_CONTEXTS["selective"], **keywords)


def _recomputed(
    now: ForwardContext, contexts: dict[str, Any], forward: Callable[..., Any], *arguments: Any, **keywords: Any
) -> Any:
    """A block's forward as a checkpoint of PyTorch's."""
    # use_reentrant=False: what is run again in backward is a part of the same graph, so that hooks (FSDP2's, DDP's)
    # see one backward. PyTorch also restores its generators, for what draws from them.
    return checkpoint(now.keep(forward), *arguments, use_reentrant=False, **contexts, **keywords)


def _keep_products(context: Any, operator: Any, *inputs: Any, **options: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


_CONTEXTS: dict[str, dict[str, Callable[..., Any]]] = {
    "full": {},
    "selective": {"context_fn": partial(create_selective_checkpoint_contexts, _keep_products)},
}
