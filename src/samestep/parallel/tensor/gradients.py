"""Compares the sliced model's gradients for an example with the whole model's.

Outputs alone don't show a gradient that is only a rank's part of the sum. So one backward runs through the whole
model and one through the sliced one, from the same random combination of the outputs. Of each parameter's gradient
only digests are kept: for each of its dimensions a vector, the sum along all others with fixed weights. A slice's
digest along the dimension of the cut is a slice of the whole one's, and the digest of a sum is the sum of digests.

Numbers may differ by more than those of outputs: rounding in the forward may move a rectifier across zero, which
changes single rows of a gradient. A gradient that lacks other ranks' parts is about as wrong as it is large.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from samestep.parallel.attributes import Attributes, forget_results, wrap_forward
from samestep.parallel.sharding import Slice
from samestep.parallel.valueless import has_values

Digests = Mapping[str, Sequence[Tensor]]  # by parameter, for each dimension a vector; for a scalar one number


def can_compare(model: nn.Module) -> bool:
    """Whether gradients have values, of enough digits for a comparison."""
    return all(
        has_values(parameter) and torch.finfo(parameter.dtype).eps < 1e-4
        for parameter in model.parameters()
        if parameter.requires_grad
    )


@contextmanager
def keeping_graph(model: nn.Module, recomputed: Sequence[nn.Module]) -> Iterator[None]:
    """Context of a forward whose gradients are wanted; the blocks in `recomputed` don't keep their activations.

    Attributes that a forward sets are restored, as they would keep its graph.
    """
    before = Attributes(model)
    try:
        for block in recomputed:
            wrap_forward(block, _recomputed)
        with torch.enable_grad():
            yield
    finally:
        before.restore()
        forget_results(model)


def digests_of(model: nn.Module, outputs: Sequence[Tensor]) -> Digests:
    """Digests of the gradients of a combination of a model's outputs; no more than one gradient is held at a time."""
    digests = dict[str, Sequence[Tensor]]()
    gradients = {parameter: parameter.grad for parameter in model.parameters()}
    outputs = [output for output in outputs if output.requires_grad]
    with ExitStack() as stack:
        for name, parameter in model.named_parameters():
            parameter.grad = None
            if parameter.requires_grad:
                stack.callback(parameter.register_post_accumulate_grad_hook(_digesting(name, digests)).remove)
        if outputs:
            torch.autograd.backward(outputs, [_weights(output.shape, output) for output in outputs])
    for parameter, gradient in gradients.items():
        parameter.grad = gradient
    return digests


def differing(
    model: nn.Module,
    expected: Digests,
    digests: Digests,
    group: dist.ProcessGroup,
    *,
    summed: Collection[str],
    slices: Mapping[str, Slice] | None = None,
) -> list[str]:
    """The parameters of which any rank of the group has another gradient than the whole model; a collective.

    `summed`: parameters of whose gradients a rank has a part of the sum; `slices`: those of which it has a slice.
    """
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    size = sum(float(of_dims[0].square().sum()) for of_dims in expected.values()) ** 0.5
    sums = _sums(parameters, digests, [name for name in parameters if name in summed], group)
    wrong: list[str] = []
    for name, parameter in parameters.items():
        cut = (slices or {}).get(name)
        dim, eps = 0 if cut is None else cut.dim, torch.finfo(parameter.dtype).eps
        own = sums[name] if name in sums else _digest(parameter, digests.get(name), dim)
        target, norm = torch.zeros_like(own), 0.0
        if name in expected:
            whole = expected[name][dim]
            norm = float(whole.norm())
            target = whole if cut is None else torch.cat([whole[first:last] for first, last in cut.mine])
        # Gradients that are zero but for rounding, as of biases that all scores share, are held against all others.
        allowed = eps**0.25 * norm + 10 * eps**0.75 * size
        if float((own.to(target) - target).norm()) > allowed:
            wrong.append(name)
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, wrong, group=group)
    return list(dict.fromkeys(name for names in everyone for name in names))


def _sums(
    parameters: Mapping[str, nn.Parameter], digests: Digests, names: Sequence[str], group: dist.ProcessGroup
) -> dict[str, Tensor]:
    """Sums over the ranks of the digests along the first dimension."""
    if not names:
        return {}
    own = [_digest(parameters[name], digests.get(name), 0).double() for name in names]
    flat = torch.cat(own).to(parameters[names[0]].device)
    dist.all_reduce(flat, group=group)
    return dict(zip(names, flat.split([len(gradient) for gradient in own]), strict=True))


def _digest(parameter: nn.Parameter, digests: Sequence[Tensor] | None, dim: int) -> Tensor:
    """A gradient's digest along a dimension; zeros for a parameter that wasn't reached."""
    if digests is not None:
        return digests[dim]
    return torch.zeros(parameter.shape[dim] if parameter.ndim else 1, device=parameter.device)


def _digesting(name: str, digests: dict[str, Sequence[Tensor]]) -> Callable[[Tensor], None]:
    """Make a hook that replaces a parameter's gradient by its digests."""

    def digest(parameter: Tensor) -> None:
        assert parameter.grad is not None
        gradient, parameter.grad = parameter.grad.detach(), None
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        if gradient.is_complex():
            gradient = torch.view_as_real(gradient).sum(-1)
        dims = range(gradient.ndim)
        digests[name] = [_along(gradient, dim) for dim in dims] if gradient.ndim else [gradient.reshape(1)]

    return digest


def _along(gradient: Tensor, dim: int) -> Tensor:
    """Sum a gradient [..., n, ...] along all dimensions but one, with weights: [n]."""
    if gradient.ndim == 2:  # without a copy
        return (gradient.t() if dim else gradient) @ _weights(gradient.shape[1 - dim : 2 - dim], gradient)
    rows = gradient.movedim(dim, 0).flatten(1) if gradient.ndim > 1 else gradient.unsqueeze(1)
    return rows @ _weights(rows.shape[1:], rows)


def _weights(shape: torch.Size, like: Tensor) -> Tensor:
    """Fixed numbers between -1 and 1 in no simple order."""
    count = torch.arange(1, shape.numel() + 1, dtype=torch.float64, device=like.device)
    return (count * 12.9898).sin().reshape(shape).to(like.dtype)


def _recomputed(forward: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    return checkpoint(forward, *arguments, use_reentrant=False, **keywords)
