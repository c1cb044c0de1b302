"""The loss of a step: one interface for all kinds of losses, called for each micro-batch's output.

A loss returns (sum, count). A step minimizes the sum of all sums / the sum of all counts over the global batch,
however it is split into micro-batches and ranks: averages of averages would give a short micro-batch's terms more
weight. A `JointLoss` can't be decomposed like this, and needs the outputs of all samples before it can compute the
first term.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.comm.mesh import Mesh
from samestep.data.loader import MicroBatch, StepBatch
from samestep.data.nests import map_tensors
from samestep.data.types import Batch
from samestep.parallel.loss.coupled import Coupling
from samestep.parallel.loss.vocabulary import Backward, Vocabulary
from samestep.parallel.parallel_model import ParallelModel
from samestep.tasks.losses import TaskLoss, takes_gather

Loss = Callable[..., tuple[Tensor, Tensor | int]]


class StepLoss:
    """A plain loss: sum and count of a micro-batch only depend on its output."""

    names: Sequence[str] = ()  # of the loss's terms, if it has several

    def __init__(self, loss: TaskLoss, vocabulary: Vocabulary | None) -> None:
        """`vocabulary`: of an output layer that may give logits in slices."""
        self._loss = loss
        self._vocabulary = vocabulary

    def prepare(self) -> None:
        """Called once, before the step's forwards; every rank calls."""
        if self._vocabulary is not None:
            self._vocabulary.slices = self._vocabulary.able

    def of(self, output: Any, micro_batch: MicroBatch) -> tuple[Tensor, Tensor | int]:
        """Compute the sum and the count of a micro-batch's loss."""
        if self._vocabulary is None:
            return self._loss(output, micro_batch.batch)
        return self._vocabulary.loss(self._loss, output, micro_batch.batch)

    def backward(self, backward: Backward) -> Backward:
        """Return the backward that starts from this loss."""
        return backward if self._vocabulary is None else self._vocabulary.backward(backward)

    def add_terms(self, totals: Tensor) -> None:
        """Add this rank's sums and counts of the terms to [sums, counts]."""


class JointLoss(StepLoss):
    """A loss that depends on the whole step: it couples samples, or its terms have separate counts.

    With one micro-batch a rank, the ranks communicate while the loss is computed. With several, all outputs are
    computed first, without graphs (`ParallelModel.rehearse`).
    """

    def __init__(self, loss: TaskLoss, batch: StepBatch, spread: ParallelModel, mesh: Mesh) -> None:
        # It needs the rows of whole outputs.
        super().__init__(loss, vocabulary=None)
        self._batch = batch
        self._spread = spread
        self._group = mesh.data_group
        self._couples = takes_gather(loss)
        self._found: dict[int, Callable[[Any], tuple[Tensor, Tensor | int]]] = {}
        self._of_batch = {id(micro_batch.batch): micro_batch for micro_batch in batch.micro_batches}
        self._several = bool(loss.weights)
        self.names = list(loss.weights)
        device = mesh.grid.device_type
        self._sums = torch.zeros(len(self.names), dtype=torch.float64, device=device)  # of this rank
        self._counts = torch.zeros(len(self.names), dtype=torch.float64, device=device)
        self._global_counts: Tensor | None = None  # [terms]

    def prepare(self) -> None:
        """With several micro-batches: compute all outputs, then the counts and gradients that the loss needs."""
        self._spread.give_whole_outputs()
        micro_batches = self._batch.micro_batches
        if len(micro_batches) == 1:
            return
        outputs = self._spread.rehearse(micro_batches)
        if outputs[0] is None:  # another rank of the pipeline has the outputs
            return
        with self._spread.autocast():
            if self._several:
                self._count(outputs)
            if self._couples:
                losses = Coupling(self._function, self._group).of_all(outputs, micro_batches)
                self._found = {id(micro_batch): of.of for micro_batch, of in zip(micro_batches, losses, strict=True)}

    def of(self, output: Any, micro_batch: MicroBatch) -> tuple[Tensor, Tensor | int]:
        """The loss of a micro-batch, from `prepare` if there are several, otherwise computed now."""
        if (loss_of := self._found.get(id(micro_batch))) is not None:
            return loss_of(output)
        if self._several and self._global_counts is None:
            self._count([output])
        if self._couples:
            return Coupling(self._function, self._group).of_one(output, micro_batch)
        return self._function(output, micro_batch.batch)

    def add_terms(self, totals: Tensor) -> None:
        totals += torch.cat([self._sums, self._counts])

    @property
    def _function(self) -> Loss:
        return self._weighted if self._several else self._loss

    def _count(self, outputs: Sequence[Any]) -> None:
        """Compute the terms' counts over the global batch, by calling the loss for all of this rank's outputs."""
        apart = [map_tensors(Tensor.detach, output) for output in outputs]
        noting = partial(_noting, self._loss, self._noted)
        with torch.no_grad():
            if self._couples:
                Coupling(noting, self._group).of_all(apart, self._batch.micro_batches)
            else:
                for output, micro_batch in zip(apart, self._batch.micro_batches, strict=True):
                    noting(output, micro_batch.batch)
        # [terms]. Every data rank calls, also one with only zero-weight samples, whose counts are zero.
        self._global_counts = self._counts.clone()
        dist.all_reduce(self._global_counts, group=self._group)

    def _noted(self, batch: Batch, counts: Sequence[Tensor | int]) -> None:
        """Add the counts of one micro-batch's terms, unless its samples have zero weight."""
        weight = self._of_batch[id(batch)].weight
        for number, count in enumerate(counts):
            # A zero-weight micro-batch.
            self._counts[number] += count * weight

    def _weighted(self, output: Any, batch: Batch, **gather: Any) -> tuple[Tensor, int]:
        """The sum over the terms of weight * sum / count * samples of the step, and the samples of this batch."""
        assert self._global_counts is not None
        micro_batch = self._of_batch[id(batch)]
        terms = self._loss.terms(output, batch, **gather)
        parts: list[Tensor] = []
        for number, (name, (value, _)) in enumerate(terms.items()):
            # The factor cancels the engine's division by the step's samples, since each term has its own count.
            count = self._global_counts[number].clamp(min=1)
            factor = self._loss.weights[name] * self._batch.global_samples / count
            parts.append(value * factor.to(value.dtype))
            self._sums[number] += value.detach() * micro_batch.weight
        return torch.stack(parts).sum(), len(micro_batch.moment.samples)


def _noting(
    loss: TaskLoss, noted: Callable[..., None], output: Any, batch: Batch, **gather: Any
) -> tuple[Tensor, int]:
    """A loss of zero, which only records the counts of the terms."""
    counts = [count for _, count in loss.terms(output, batch, **gather).values()]
    noted(batch, counts)
    return torch.zeros(()), 1


def step_loss(loss: TaskLoss, batch: StepBatch, spread: ParallelModel, mesh: Mesh) -> StepLoss:
    """Make the object that computes a step's loss on this rank."""
    joint = takes_gather(loss) or loss.weights
    return JointLoss(loss, batch, spread, mesh) if joint else StepLoss(loss, spread.vocabulary)
