"""Spread: a model spread over ranks. How it takes micro-batches, and where its parameters are."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from samestep.data.loader import MicroBatch
from samestep.parallel.buffers import check_buffers, versions
from samestep.parallel.moment import Now
from samestep.parallel.parts import Parts
from samestep.parallel.used import Used
from samestep.tasks.base import call

# From the model's output for a micro-batch to what backward starts from.
Term = Callable[[Any, MicroBatch], Tensor]
Context = Callable[[], AbstractContextManager[Any]]


class Spread(ABC):
    """A model spread over ranks."""

    def __init__(self, *, model: nn.Module, parts: Parts, now: Now, autocast: Context) -> None:
        self.model = model  # with the parameters that this rank holds, by their names in the whole model
        self.parts = parts
        self.now = now
        self.autocast = autocast

    @abstractmethod
    def take(
        self,
        micro_batches: Sequence[MicroBatch],
        *,
        term: Term,
        backward: Callable[[Tensor], None],
        forwards_done: Callable[[], None],
    ) -> None:
        """Forward and backward of every micro-batch; leave the gradients averaged over the data ranks.

        `term` is called where the model's output is. `forwards_done` is called once, when it won't be called again.
        """

    @abstractmethod
    def predict(self, inputs: Any) -> Any:
        """The model's output, or None on a rank that has no part in its last layer."""


class WholeModel(Spread):
    """Every rank runs all of the model's layers, each on its own samples or its own part of every layer."""

    def __init__(self, *, module: nn.Module, accumulating: Context, used: Used, **common: Any) -> None:
        super().__init__(**common)
        self._used = used
        self._buffers_checked = False
        self.module = module  # what forward calls
        self._accumulating = accumulating  # forward and backward without messages

    def take(
        self,
        micro_batches: Sequence[MicroBatch],
        *,
        term: Term,
        backward: Callable[[Tensor], None],
        forwards_done: Callable[[], None],
    ) -> None:
        before = {} if self._buffers_checked else versions(self.model)
        *first, last = micro_batches
        for micro_batch in first:
            with self._accumulating():
                backward(self._forward(micro_batch, term))
        loss = self._forward(last, term)
        forwards_done()
        backward(self._used.reach(loss))
        self._used.settle()
        if not self._buffers_checked:
            self._buffers_checked = True
            check_buffers(self.model, before, self.parts.mesh.data_group)
        self.parts.sum_gradients(self.model)

    def _forward(self, micro_batch: MicroBatch, term: Term) -> Tensor:
        with self.now.at(micro_batch.moment), self.autocast():
            return term(call(self.module, micro_batch.batch.inputs), micro_batch)

    def predict(self, inputs: Any) -> Any:
        with torch.no_grad(), self.autocast():
            return call(self.model, inputs)
