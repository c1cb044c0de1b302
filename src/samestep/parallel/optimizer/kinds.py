"""Find out by trial whether an optimizer is elementwise, so that parts of a parameter can be stepped separately.

Most optimizers are elementwise, so that a rank steps the shard or slice that it holds. Others use a whole matrix
(Muon's orthogonalization, Adafactor's means of rows and columns) or a tensor's norm (LAMB, LARS), and are wrong on a
part of it. A few use several parameters at once, such as those that find their own rate. No list of names could be
complete, so small parameters are stepped whole and in pieces, in float64, and compared.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from samestep.errors import UserError
from samestep.parallel.exact.float64 import in_float64

Make = Callable[[Sequence[dict[str, Any]]], Optimizer]  # from groups of parameters with their settings

_STEPS = 6  # an optimizer may begin otherwise than it goes on
_LARGEST = 144  # numbers along a dimension; an optimizer may treat tensors of 128 rows otherwise than smaller ones
_MOST = 1 << 17  # numbers of one parameter
_SAME = 1e-6  # of the largest update; rounding in float64 is far below it, a wrong piece far above


@dataclass(frozen=True, kw_only=True)
class OptimizerKind:
    """Properties of an optimizer, for the shapes and settings that were tried."""

    by_number: bool  # elementwise: updates every element separately
    alone: bool  # updates every parameter separately
    draws: bool  # draws random numbers
    settings_change: Sequence[str]  # entries of its groups that a step changes


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """Parameters of the whole model that have the same settings."""

    settings: Mapping[str, Any]  # of their group
    shapes: Sequence[torch.Size]


def kind_of(make: Make, groups: Sequence[Shapes], title: str) -> OptimizerKind:
    """Try an optimizer on small CPU parameters with the same numbers of dimensions as the real ones.

    The result is the same on every rank for the same arguments. Raises UserError if a step fails.
    """
    tried = [(group.settings, shape) for group in groups for shape in _one_of_each(group.shapes)]
    kinds = [_kind(make, settings, shape, title) for settings, shape in tried]
    return OptimizerKind(
        by_number=all(kind.by_number for kind in kinds),
        alone=all(kind.alone for kind in kinds),
        draws=any(kind.draws for kind in kinds),
        settings_change=list(dict.fromkeys(name for kind in kinds for name in kind.settings_change)),
    )


def _one_of_each(shapes: Sequence[torch.Size]) -> list[tuple[int, ...]]:
    """The shape to try for each number of dimensions: that of the largest parameter, reduced to a small size."""
    largest: dict[int, torch.Size] = {}
    for shape in shapes:
        if len(shape) not in largest or shape.numel() > largest[len(shape)].numel():
            largest[len(shape)] = shape
    return [_smaller(shape) for shape in largest.values()]


def _smaller(shape: torch.Size) -> tuple[int, ...]:
    sizes = [min(size, _LARGEST) for size in shape]
    while torch.Size(sizes).numel() > _MOST:
        at = sizes.index(max(sizes))
        sizes[at] = (sizes[at] + 1) // 2
    return tuple(max(2, size) for size in sizes)  # one number alone is no whole to be cut


def _kind(make: Make, settings: Mapping[str, Any], shape: tuple[int, ...], title: str) -> OptimizerKind:
    with torch.random.fork_rng(devices=[]), in_float64(), torch.enable_grad():
        torch.manual_seed(0)
        start = torch.randn(shape, dtype=torch.float64)
        gradients = [torch.randn(shape, dtype=torch.float64) for _ in range(_STEPS)]
        other = torch.randn(shape, dtype=torch.float64)
        before = torch.get_rng_state()
        (whole,), changed = _stepped(make, settings, [start], [[gradient] for gradient in gradients], title)
        draws = not torch.equal(before, torch.get_rng_state())
        largest = (whole - start).abs().max().item()
        pair, _ = _stepped(
            make, settings, [start, other], [[gradient, 3 * gradient] for gradient in gradients], title
        )
        by_number = True
        for dim in range(len(shape)):
            if not by_number:
                break
            sizes = [shape[dim] // 3 + 1, shape[dim] - shape[dim] // 3 - 1]
            pieces, _ = _stepped(
                make, settings, start.split(sizes, dim), [gradient.split(sizes, dim) for gradient in gradients], title
            )
            by_number = _same(torch.cat(list(pieces), dim), whole, largest)
    return OptimizerKind(
        by_number=by_number or draws,  # nothing can be said of one that draws
        alone=_same(pair[0], whole, largest) or draws,
        draws=draws,
        settings_change=changed,
    )


def _same(one: Tensor, other: Tensor, largest: float) -> bool:
    return bool((one - other).abs().max() <= _SAME * largest)


def _stepped(
    make: Make,
    settings: Mapping[str, Any],
    values: Sequence[Tensor],
    gradients: Sequence[Sequence[Tensor]],
    title: str,
) -> tuple[list[Tensor], list[str]]:
    """Step parameters with each of the gradients. Returns their values, and the names of settings that changed."""
    parameters = [nn.Parameter(value.contiguous().clone()) for value in values]
    optimizer = make([{**settings, "params": parameters}])
    before = dict(optimizer.param_groups[0])
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.contiguous().clone()
        try:
            optimizer.step()
        except Exception as error:
            raise UserError(f"{title} can't take a step: {_reason(error)}") from error
    after = optimizer.param_groups[0]
    changed = [name for name in after if name != "params" and _differs(after[name], before.get(name))]
    return [parameter.detach() for parameter in parameters], changed


def _differs(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return one is not other
    return bool(one != other)


def _reason(error: Exception) -> str:
    text = str(error).partition("\n")[0]
    if "closure" in text:
        return (
            "it wants a closure that computes the loss several times in one step, which no layout takes; use an "
            "optimizer that steps with the gradients that are there"
        )
    if "sparse" in text.lower():
        return f"gradients are dense here, and it says: {text}; use an optimizer of dense gradients"
    return f"{type(error).__name__}: {text}"
