"""Recomputation: blocks free their activations after forward and recompute them in backward.

(Chen et al. 2016; selective: Korthikanti et al. 2022, section 5.)

The recomputed forward is wrapped by `ForwardContext.keep`, so that dropout draws the same numbers and batch norm does
not update its running statistics again.
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
from samestep.torch_internals.modules import AnyBatchNorm
from samestep.torch_internals.operators import ATTENTION_KERNELS

_aten = torch.ops.aten

# Operators whose results selective recomputation saves: matrix products, which are expensive for their size.
_KEPT = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        *ATTENTION_KERNELS,
    }
)


def recompute(blocks: Sequence[nn.Module], how: Recompute, forward_context: ForwardContext) -> None:
    """Make each block recompute all of its activations ("full"), or all but matrix products ("selective").

    "full" only saves a block's inputs; its activations exist during its backward only. "selective" also saves the
    results of products and attention, and recomputes norms, activation functions and the like, which are cheap and
    use most of the memory.
    """
    for block in blocks:
        # The forward is replaced, not the module, so that parameters keep their names.
        wrap_forward(block, partial(_recomputed, forward_context, _CONTEXTS[how]))


def in_graph(blocks: Sequence[nn.Module], layout: Layout) -> bool:
    """Whether selective recomputation is compiled with the block.

    The policy of `recompute` sees the operators that a block calls, but a compiled block calls none. So the policy is
    traced as a part of the block. This excludes blocks with state or communication: tensor and context parallelism,
    and batch norm. Those blocks are recomputed in full.
    """
    if layout.recompute != "selective" or layout.tensor > 1 or layout.context > 1:
        return False
    parts = (part for block in blocks for part in block.modules())
    return not any(isinstance(part, AnyBatchNorm) for part in parts)


def selectively(forward: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """A block's forward with selective recomputation, for the compiler; it keeps no context, as it is traced once."""
    return checkpoint(forward, *arguments, use_reentrant=False, **_CONTEXTS["selective"], **keywords)


def _recomputed(
    forward_context: ForwardContext,
    contexts: dict[str, Any],
    forward: Callable[..., Any],
    *arguments: Any,
    **keywords: Any,
) -> Any:
    """Run a block's forward under PyTorch's checkpoint."""
    # use_reentrant=False: the recomputation is a part of the same graph, so that hooks (FSDP2's, DDP's) see one
    # backward. PyTorch also restores its generators.
    return checkpoint(forward_context.keep(forward), *arguments, use_reentrant=False, **contexts, **keywords)


def _keep_products(context: Any, operator: Any, *inputs: Any, **options: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


_CONTEXTS: dict[str, dict[str, Callable[..., Any]]] = {
    "full": {},
    "selective": {"context_fn": partial(create_selective_checkpoint_contexts, _keep_products)},
}
