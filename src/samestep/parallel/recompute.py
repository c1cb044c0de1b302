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

from samestep.layout import Recompute
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
        block.forward = partial(_recomputed, block.forward, now, _CONTEXTS[how])


def _recomputed(
    forward: Callable[..., Any], now: ForwardContext, contexts: dict[str, Any], *arguments: Any, **keywords: Any
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
