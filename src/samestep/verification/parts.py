"""The weight that the samples of each rank and micro-batch have in a gradient, by least squares.

Where samples, weights and forwards are the same and gradients are not, the ranks' parts were added up with other
weights. A part is one micro-batch of one rank. Its gradient is taken by PyTorch alone, of the sum that the task's
loss returns, and the step's gradient is written as a sum of parts: one process gives all the same weight. If the
fit leaves nothing over, its weights are the fault: 1 / count of each part is a mean of means.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.data.loader import StepBatch
from samestep.data.types import Batch
from samestep.parallel.complex_parameters import as_real
from samestep.recipe import Recipe
from samestep.tasks.base import Task, call
from samestep.tasks.losses import task_loss
from samestep.torch_internals import pytree
from samestep.training.as_built import built_model, dense

# Share of a gradient that a fit may leave over: parts are computed in the model's own dtype.
_REST = 1e-3
_EVEN = 0.01  # weights that differ by less are the same
_MOST_NUMBERS = 1 << 26  # of all parts together


@dataclass(frozen=True, kw_only=True)
class Part:
    """One micro-batch of one rank: its loss's count, and the gradient of its loss's sum, flattened."""

    count: float
    gradient: Tensor  # [numbers] float64


def parts_of(
    recipe: Recipe,
    task: Task,
    weights: Mapping[str, Tensor],
    names: Sequence[str],
    batch: StepBatch,
    device: torch.device,
) -> list[Part]:
    """Compute this rank's parts at the given weights; none if the model can't be computed so.

    `names`: the parameters whose gradients are taken. Micro-batches that count for nothing are left out.
    """
    try:
        model = built_model(recipe, task, device)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(weights[name].to(parameter.dtype))
        loss_of = task_loss(task.loss, task.loss_weights).of_whole_batch
        parts = []
        for micro_batch in batch.micro_batches:
            if not micro_batch.weight:
                continue
            model.zero_grad()
            own = Batch(*(_as_built(part, model) for part in micro_batch.batch))
            total, count = loss_of(call(model, own.inputs), own)
            total.backward()
            parts.append(Part(count=float(count), gradient=_flat(model, names)))
    except (RuntimeError, ValueError, TypeError, KeyError, IndexError):
        return []
    return parts


def _as_built(nest: Any, model: torch.nn.Module) -> Any:
    """Cast a nest's floating-point tensors, which a proof in float64 has cast, to the dtype of the model as built."""
    dtype = next((leaf.dtype for leaf in model.parameters() if leaf.is_floating_point()), torch.float32)
    return pytree.tree_map_only(Tensor, lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, nest)


def _flat(model: torch.nn.Module, names: Sequence[str]) -> Tensor:
    """The gradients of parameters, one after the other."""
    parameters = dict(model.named_parameters())
    gradients = []
    for parameter in (parameters[name] for name in names):
        gradient = torch.zeros_like(parameter) if parameter.grad is None else dense(parameter.grad)
        gradients.append(as_real(gradient).double().reshape(-1).cpu())
    return torch.cat(gradients)


@dataclass(frozen=True, kw_only=True)
class PartWeights:
    """How much more than in one process the samples of each part count."""

    counts: Sequence[float]
    ratios: Sequence[float]

    @property
    def even(self) -> bool:
        return max(self.ratios) - min(self.ratios) <= _EVEN * max(map(abs, self.ratios))

    @property
    def mean_of_means(self) -> bool:
        """Whether each part's weight is the inverse of its count."""
        if 0 in self.counts or max(self.counts) == min(self.counts):
            return False
        products = [count * ratio for count, ratio in zip(self.counts, self.ratios, strict=True)]
        return max(products) - min(products) <= _EVEN * max(map(abs, products))


def weights_of_parts(
    parts: Sequence[Part], alone: Tensor, split: Tensor, others: Sequence[Tensor]
) -> PartWeights | None:
    """Fit both gradients, [numbers], by the parts of all ranks; None if a fit leaves something over.

    `others`: what both may hold besides, such as an earlier average of gradients, or the weights of a decay.
    """
    if len(parts) < 2 or len(parts) * alone.numel() > _MOST_NUMBERS:
        return None
    if any(part.gradient.shape != alone.shape for part in parts):
        return None
    columns = [part.gradient for part in parts] + [other for other in others if other.any()]
    matrix = torch.stack([column / column.norm().clamp_min(1e-300) for column in columns], dim=1)
    scales = torch.stack([column.norm() for column in columns])
    fits = []
    for gradient in (alone, split):
        fit = torch.linalg.lstsq(matrix, gradient[:, None], driver="gelsd").solution[:, 0]
        rest = (matrix @ fit - gradient).norm().item()
        if not rest <= _REST * gradient.norm().item():
            return None
        fits.append((fit / scales)[: len(parts)].tolist())
    expected = math.fsum(fits[0]) / len(parts)
    alone_weights = PartWeights(counts=[part.count for part in parts], ratios=fits[0])
    if (
        not expected or not alone_weights.even
    ):  # parts that can't be told apart, or a loss that is no sum over samples
        return None
    return PartWeights(counts=alone_weights.counts, ratios=[weight / expected for weight in fits[1]])


def gathered(parts: Sequence[Part], group: dist.ProcessGroup | None = None) -> list[Part]:
    """The parts of all ranks; none if a rank has none. Collective."""
    ranks: list[Sequence[Part]] = [()] * dist.get_world_size(group)
    dist.all_gather_object(ranks, parts, group=group)
    return [part for of_rank in ranks for part in of_rank] if all(ranks) else []
