"""ParallelModel: a model spread over ranks, with its forward and backward over micro-batches."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from samestep.data.loader import MicroBatch
from samestep.layout import Layout
from samestep.parallel.calls import Trace
from samestep.parallel.ddp import average_experts, average_what_is_whole
from samestep.parallel.deferred_init import InitialValues
from samestep.parallel.exact import generators
from samestep.parallel.exact.batch_buffers import BatchBuffers
from samestep.parallel.exact.buffers import RepeatedForwards, check_buffers, versions
from samestep.parallel.exact.forward_context import ForwardContext
from samestep.parallel.fsdp import put_back
from samestep.parallel.loss.chunked_logits import SharedLogits
from samestep.parallel.loss.vocabulary import Backward, Vocabulary
from samestep.parallel.offload.memory import HostMemory, MappedFile
from samestep.parallel.optimizer.late import LateParameters
from samestep.parallel.pipeline.timeline import Timeline
from samestep.parallel.sharding import ShardTable
from samestep.parallel.sparse_rows import RowExchange
from samestep.parallel.unused_parameters import UnusedParameters
from samestep.profiling.clock import StepClock
from samestep.tasks.base import call

# (output of the model, micro-batch) -> the scaled loss term, from which backward starts
Term = Callable[[Any, MicroBatch], Tensor]
Context = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True, kw_only=True)
class WholeModules:
    """The modules that must stay whole for a sliced model to give the output of the whole one."""

    whole: Mapping[str, str]  # module -> why
    by_head: Collection[str]  # columns that are laid out head by head
    tried: Mapping[str, int]  # patterns of parameters -> the number of the way in which they are cut
    able: bool  # whether logits can stay in slices


@dataclass(frozen=True, kw_only=True)
class Findings:
    """Results that are computed once where one process spreads the same model and example several times.

    A trace takes as long as some steps, seconds for a Llama of 80 layers. Layouts that are proved one after another
    share it, and so do the ranks of a rehearsal, which runs them in turn. In a training each rank traces for itself.
    """

    followed: list[Trace] = field(default_factory=list)  # none or one, without values, up to the first failure
    traces: list[Trace] = field(default_factory=list)  # none or one, of the whole forward
    # Of a rehearsal, which has no values to compare: what another rank left whole, by lists whose tokens are split.
    slices: dict[Sequence[Any], WholeModules] = field(default_factory=dict)

    def of_model(self) -> "Findings":
        """The shared traces of the model, for another layout: without what was found about slices."""
        return replace(self, slices={})


@dataclass(frozen=True, kw_only=True)
class ModelDetails:
    """What spreading takes of a model beside its modules; all are optional."""

    # Inputs of a few samples, with which layouts that cut the model itself trace its forward.
    example: Any = None
    # The values of parameters on the meta device.
    initial: InitialValues | None = None
    # Buffers that are a mean or a sum over the batch (name or pattern -> "mean" or "sum").
    batch_buffers: Mapping[str, str] = field(default_factory=dict)
    # Results shared by the ranks of a rehearsal; None: a training.
    findings: Findings | None = None


class ParallelModel(ABC):
    """A model spread over ranks.

    One instance for each rank. All ranks call `forward_backward`, `predict` and `settle` in the same order, since
    each communicates: if a rank skips one, the others hang until the watchdog ends them.
    """

    timeline: Timeline | None = None  # records a pipeline's actions in one step
    clock: StepClock | None = None  # times the phases of a step, if steps are profiled
    late: LateParameters | None = None  # pending broadcasts of updated parameters

    def __init__(
        self,
        *,
        model: nn.Module,
        parts: ShardTable,
        forward_context: ForwardContext,
        autocast: Context,
        host: HostMemory,
        vocabulary: Vocabulary | None = None,
        shared_logits: SharedLogits | None = None,
        disk: MappedFile | None = None,
        buffers: BatchBuffers | None = None,
    ) -> None:
        self.model = model  # with the parameters that this rank holds, by their names in the whole model
        self.parts = parts
        self.forward_context = forward_context
        self.autocast = autocast
        self.buffers = buffers or BatchBuffers(model, {}, parts.mesh.data_group, forward_context)
        self.repeated = RepeatedForwards(model, joined=self.buffers.joins)
        self.vocabulary = vocabulary  # if the output layer may be sliced
        self._shared_logits = shared_logits  # if the output layer's rows are distributed
        self.host = host  # for offloaded activations
        self.disk = disk  # for offloaded parameters

    @abstractmethod
    def forward_backward(
        self,
        micro_batches: Sequence[MicroBatch],
        *,
        term: Term,
        backward: Backward,
        forwards_done: Callable[[], None],
    ) -> None:
        """Run forward and backward of every micro-batch, and average the gradients over the data ranks.

        `term` is called on ranks with the model's output. `forwards_done` is called once, after the last `term`.
        """

    def sum_along(self, totals: Tensor) -> bool:
        """Ask the running `forward_backward` to all-reduce a tensor over the data ranks, as part of another message.

        It may be called in `forwards_done`. Returns False if the caller must do it itself.
        """
        return False

    def settle(self) -> None:
        """Wait for pending broadcasts of parameters; call it before reading them."""
        if self.late is not None:
            self.late.settle()

    def give_whole_outputs(self) -> None:
        """Make training forwards return whole outputs from now on, not slices or distributed rows."""
        if self._shared_logits is not None:
            self._shared_logits.able = False
        if self.vocabulary is not None:
            self.vocabulary.slices = False

    def rehearse(self, micro_batches: Sequence[MicroBatch]) -> list[Any]:
        """Run a step's training forwards without graphs and without changing the model's state; returns the outputs.

        Random numbers are drawn by sample, so `forward_backward` draws the same. An output is None on ranks without
        the model's last layer.
        """
        outputs: list[Any] = []
        for micro_batch in micro_batches:
            with (
                torch.no_grad(),
                self.forward_context.at(micro_batch.moment),
                self.forward_context.rehearsing(),
                self.autocast(),
            ):
                outputs.append(self.predict(micro_batch.batch.inputs))
        return outputs

    @abstractmethod
    def predict(self, inputs: Any) -> Any:
        """Run the model; None on ranks without its last layer."""


class WholeModel(ParallelModel):
    """Every rank runs all of the model's layers, each on its own samples or its own part of every layer."""

    def __init__(
        self,
        *,
        module: nn.Module,
        accumulating: Context,
        used: UnusedParameters,
        rows: RowExchange | None = None,
        repeatable: bool = False,
        late: LateParameters | None = None,
        **common: Any,
    ) -> None:
        """`rows`: averages the gradients that `module` ignores. `late`: see `ParallelModel`.

        `repeatable`: whether a forward may be repeated, with the second run replacing the first. Then it must not
        communicate, and backward must not recompute any of it.
        """
        super().__init__(**common)
        self._used = used
        self._rows = rows
        self._repeatable = repeatable
        self.late = late
        self._watches_draws = True
        self._buffers_checked = False
        self.module = module  # the (wrapped) model that forward calls
        self.accumulating = accumulating  # context of backwards without gradient communication

    def forward_backward(
        self,
        micro_batches: Sequence[MicroBatch],
        *,
        term: Term,
        backward: Backward,
        forwards_done: Callable[[], None],
    ) -> None:
        """Run the micro-batches with gradient accumulation; the last backward communicates the gradients.

        So a step sends each gradient once for any number of micro-batches, as with DDP's `no_sync`. The order of the
        calls after backward is the same on every rank, as each may communicate.
        """
        # Versions of the buffers are compared in the first step only, where a forward that changes one shows.
        before = {} if self._buffers_checked else versions(self.model)
        *first, last = micro_batches
        for number, micro_batch in enumerate(first):
            with self.accumulating(), self.repeated.watched() if number else nullcontext():
                backward(self.forward(micro_batch, term))
        with self.repeated.watched() if first else nullcontext():
            loss = self.forward(last, term)
        # The loss sums of all micro-batches are known here, so their all-reduce overlaps with the last backward.
        forwards_done()
        with self.repeated.watched():  # blocks may be recomputed
            # `reach` makes the loss depend on every parameter, as DDP and FSDP2 need a gradient also for branches
            # that were not taken.
            backward(self._used.reach(loss))
        self.repeated.check(_times(len(micro_batches), self.parts.layout))
        # ZeRO-1: wait for the reductions within the shard group to each parameter's owner; other ranks get zeros.
        if self.parts.owners is not None:
            self.parts.owners.settle()
        # The flags of used parameters are sent along with the rows of embeddings, to save a message.
        used_by_any = None if self._rows is None else self._rows.exchange(self._used.noted())
        average_experts(self.model, self.parts)  # before gradients of unused parameters are set to None
        # From here on `grad is None` means that no rank used a parameter, as in one process.
        if used_by_any is None:
            self._used.settle()
        else:
            self._used.forget(used_by_any)
        # Owners in different replicas sum their gradients only now, after the reductions within the shard group.
        if self.parts.owners is not None:
            self.parts.owners.sum_replicas(self.model.parameters())
        self.buffers.settle()
        if not self._buffers_checked:
            self._buffers_checked = True
            check_buffers(self.model, before, self.parts.mesh.data_group)
            self.watch_draws(buffers_moved=before != versions(self.model))
        # FSDP2 has reduced sharded parameters; scalars and other unsharded ones are averaged here.
        if self.parts.layout.zero >= 2:
            average_what_is_whole(self.model, self.parts)
        # Sum gradients that are in parts on tensor and context ranks. This commutes with averaging over data ranks,
        # and comes last since FSDP2's shards are smaller than whole gradients.
        self.parts.sum_gradients(self.model)

    def sum_along(self, totals: Tensor) -> bool:
        return self._rows is None and self._used.sum_along(totals)

    def watch_draws(self, *, buffers_moved: bool) -> None:
        """Decide after the first step whether forwards still run under the mode that handles random draws."""
        self._watches_draws = not self._repeatable or self.forward_context.drew or buffers_moved

    def forward(self, micro_batch: MicroBatch, term: Term) -> Tensor:
        """Run a training forward of one micro-batch up to the loss term []; its units wait for late parameters."""
        if self.late is not None:
            self.late.begin()
        with self.forward_context.at(micro_batch.moment), self.autocast():
            output = self._output(micro_batch.batch.inputs)
            self.settle()  # the loss may read parameters that this forward did not use
            return term(output, micro_batch)

    def _output(self, inputs: Any) -> Any:
        """Run the model. The mode for random draws costs time, so it is skipped if no forward has drawn so far."""
        if self._watches_draws:
            return call(self.module, inputs)
        device = torch.device(self.parts.mesh.grid.device_type)
        before = generators.state_of_torch(device)
        with self.forward_context.unwatched():
            output = call(self.module, inputs)
        if generators.moved(before, generators.state_of_torch(device)) is None:
            return output
        # The forward drew after all: restore the generators, and repeat the forward under the mode. Models whose
        # forwards change buffers are excluded by `watch_draws`.
        self._watches_draws = True
        generators.restore_torch(before, device)
        return call(self.module, inputs)

    def predict(self, inputs: Any) -> Any:
        """Run a forward without gradients, in the model's present mode; every rank of the model calls it."""
        self.settle()
        with torch.no_grad(), self.autocast():
            output = call(self.model, inputs)
        # A forward without a backward leaves FSDP2's parameters gathered.
        put_back(self.model)
        return output


def _times(micro_batches: int, layout: Layout) -> str:
    again = f", and recompute={layout.recompute} another in backward" * (layout.recompute != "none")
    return f"a step of this rank runs {micro_batches} forward{'s' * (micro_batches > 1)}{again}"
