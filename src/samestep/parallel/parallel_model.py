"""ParallelModel: a model spread over ranks. How it takes micro-batches, and where its parameters are."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from samestep.data.loader import MicroBatch
from samestep.layout import Layout
from samestep.parallel.calls import Trace
from samestep.parallel.chunked_logits import SharedLogits
from samestep.parallel.ddp import average_experts, average_what_is_whole
from samestep.parallel.deferred_init import InitialValues
from samestep.parallel.exact import generators
from samestep.parallel.exact.batch_buffers import BatchBuffers
from samestep.parallel.exact.buffers import RepeatedForwards, check_buffers, versions
from samestep.parallel.exact.forward_context import ForwardContext
from samestep.parallel.fsdp import put_back
from samestep.parallel.late_parameters import LateParameters
from samestep.parallel.offload.memory import HostMemory, MappedFile
from samestep.parallel.pipeline.timeline import Timeline
from samestep.parallel.sharding import ShardTable
from samestep.parallel.sparse_rows import Choice, RowExchange
from samestep.parallel.tensor.vocab_parallel import Backward, Loss, Vocabulary
from samestep.parallel.unused_parameters import Used
from samestep.profiling.clock import StepClock
from samestep.tasks.base import call

# From the model's output for a micro-batch to what backward starts from.
Term = Callable[[Any, MicroBatch], Tensor]
Context = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True, kw_only=True)
class Slices:
    """With which modules left whole a sliced model has given the output of the whole one."""

    whole: Mapping[str, str]  # module -> why
    by_head: Collection[str]  # columns that are laid out head by head
    able: bool  # whether logits can stay in slices


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What the first of the ranks that are rehearsed one after the other has found out about their model.

    Ranks of one pipeline build the same model and follow the same example, of a Llama of 80 layers for seconds each
    time. What that tells is the same for all of them. Ranks that run find out by themselves, each for its own.
    """

    traces: list[Trace] = field(default_factory=list)  # none or one
    slices: dict[Sequence[Any], Slices] = field(default_factory=dict)  # by the lists whose tokens are split


@dataclass(frozen=True, kw_only=True)
class Details:
    """What spreading a model wants to know beyond the layout; all of it may be missing."""

    # What the model may be called with: a batch's inputs, a few samples. Layouts that cut the model itself look
    # with it at what its forward does.
    example: Any = None
    # The values of the parameters that are on the meta device.
    initial: InitialValues | None = None
    # Which layers a tensor parallel layout slices how (name or pattern -> role), where that is not to be found.
    tensor_plan: Mapping[str, str] | None = None
    # Which modules are experts that ranks share out (name or pattern -> role), where that is not to be found.
    expert_plan: Mapping[str, str] | None = None
    # The layers with which pipeline stages begin, but the first; without it they are found.
    cut_at: Sequence[str] = ()
    # Whether each block is compiled by torch.compile.
    compile: bool = False
    # Whether attention drops weights, where the model says so.
    attention_dropout: bool = True
    # Rows of logits that the output layer and cross-entropy compute at a time; None: all.
    loss_chunk: int | None = None
    # Megabytes of gradients that replicas send together; None: as many as PyTorch's DistributedDataParallel sends.
    bucket_mb: float | None = None
    # Buffers that are a mean or a sum over the batch (name or pattern -> which).
    batch_buffers: Mapping[str, str] = field(default_factory=dict)
    # For layouts that move something to disk; None: the system's folder for temporary files.
    offload_folder: Path | None = None
    # The engine's own configuration file, which is taken as it is.
    engine_config: Path | None = None
    # Whether replicas send gradients of embeddings as the rows that were touched.
    sparse_rows: Choice = "auto"
    # Whether the replicas of a host share one copy of parameters and optimizer state.
    share_replicas: bool = False
    # Into how many pieces, each with its own forward and backward, the global batch is cut for a sum of gradients in
    # one order whatever the layout; None: into as many as there are ranks and micro-batches.
    virtual_ranks: int | None = None
    # Whether parameters that a step has changed may still be on their way when it ends. Only the trainer then
    # looks at the model between two steps.
    late_parameters: bool = False
    # Samples of one step over all ranks, and most samples of one forward on one rank, as the job says them.
    batch: int | None = None
    micro_batch: int | None = None
    # What ranks that are rehearsed one after the other need not find out again; None: a rank that runs.
    findings: Findings | None = None


class ParallelModel(ABC):
    """A model spread over ranks.

    One instance a rank. All ranks call `forward_backward`, `predict` and `settle` in the same order, since each sends
    messages: a rank that leaves one out makes the others wait until the watchdog ends them.
    """

    timeline: Timeline | None = None  # where a pipeline writes down what it did in one step
    clock: StepClock | None = None  # to which the phases of a step are reported, where steps are profiled
    late: LateParameters | None = None  # where parameters that a step has changed come while the next one runs

    def __init__(
        self,
        *,
        model: nn.Module,
        parts: ShardTable,
        now: ForwardContext,
        autocast: Context,
        host: HostMemory,
        vocabulary: Vocabulary | None = None,
        shared_logits: SharedLogits | None = None,
        disk: MappedFile | None = None,
        buffers: BatchBuffers | None = None,
    ) -> None:
        self.model = model  # with the parameters that this rank holds, by their names in the whole model
        self.parts = parts
        self.now = now
        self.autocast = autocast
        self.buffers = buffers or BatchBuffers(model, {}, parts.mesh.data_group, now)
        self.repeated = RepeatedForwards(model, joined=self.buffers.joins)
        self._vocabulary = vocabulary  # where the output layer may be sliced
        self._shared_logits = shared_logits  # where ranks share out its rows
        self.host = host  # where offloaded activations wait
        self.disk = disk  # where offloaded parameters lie

    @abstractmethod
    def forward_backward(
        self,
        micro_batches: Sequence[MicroBatch],
        *,
        term: Term,
        backward: Backward,
        forwards_done: Callable[[], None],
    ) -> None:
        """Forward and backward of every micro-batch; leave the gradients averaged over the data ranks.

        `term` is called where the model's output is. `forwards_done` is called once, when it won't be called again.
        """

    def sum_along(self, totals: Tensor) -> bool:
        """Whether the running `forward_backward` sums this tensor over the data ranks, in place, before it returns.

        It may be asked in `forwards_done`. What it sends anyhow then carries the tensor, which is one message less.
        """
        return False

    def around(self, loss: Loss, backward: Backward) -> tuple[Loss, Backward]:
        """The loss and the backward of a step, as what this spread gives for an output wants them."""
        return (loss, backward) if self._vocabulary is None else self._vocabulary.around(loss, backward)

    def settle(self) -> None:
        """Wait until this rank has its parameters as the last step left them; before they are read."""
        if self.late is not None:
            self.late.settle()

    def give_whole_outputs(self) -> None:
        """From here on, training forwards give no output in slices or rows."""
        if self._shared_logits is not None:
            self._shared_logits.able = False
        if self._vocabulary is not None:
            self._vocabulary.slices = False

    def rehearse(self, micro_batches: Sequence[MicroBatch]) -> list[Any]:
        """The outputs of a step's training forwards, without graphs and without a trace in the model.

        Random numbers are drawn by sample, so `forward_backward` draws the same. None in place of an output on a
        rank that has no part in the model's last layer.
        """
        outputs: list[Any] = []
        for micro_batch in micro_batches:
            with torch.no_grad(), self.now.at(micro_batch.moment), self.now.rehearsing(), self.autocast():
                outputs.append(self.predict(micro_batch.batch.inputs))
        return outputs

    @abstractmethod
    def predict(self, inputs: Any) -> Any:
        """The model's output, or None on a rank that has no part in its last layer."""


class WholeModel(ParallelModel):
    """Every rank runs all of the model's layers, each on its own samples or its own part of every layer."""

    def __init__(
        self,
        *,
        module: nn.Module,
        accumulating: Context,
        used: Used,
        rows: RowExchange | None = None,
        repeatable: bool = False,
        late: LateParameters | None = None,
        **common: Any,
    ) -> None:
        """`rows`: averages the gradients that `module` leaves alone. `late`: see `ParallelModel`.

        `repeatable`: a forward may be run once more in place of the one before. It must send no messages, and
        backward must not run any of it again.
        """
        super().__init__(**common)
        self._used = used
        self._rows = rows
        self._repeatable = repeatable
        self.late = late
        self._watches_draws = True
        self._buffers_checked = False
        self.module = module  # what forward calls
        self.accumulating = accumulating  # forward and backward without messages

    def forward_backward(
        self,
        micro_batches: Sequence[MicroBatch],
        *,
        term: Term,
        backward: Backward,
        forwards_done: Callable[[], None],
    ) -> None:
        """The order of what follows backward is the same on every rank, as each line may send messages.

        Gradients of all micro-batches but the last are added up locally; the last backward sends them. So a step
        sends each gradient once, whatever the number of micro-batches (gradient accumulation as under DDP's
        `no_sync`).
        """
        # Versions of the buffers: a forward that moves one shows in the first step, which is compared once and no
        # more.
        before = {} if self._buffers_checked else versions(self.model)
        *first, last = micro_batches
        for number, micro_batch in enumerate(first):
            with self.accumulating(), self.repeated.watched() if number else nullcontext():
                backward(self.forward(micro_batch, term))
        with self.repeated.watched() if first else nullcontext():
            loss = self.forward(last, term)
        # The loss sums of all micro-batches are known here, so they travel while the last backward runs.
        forwards_done()
        with self.repeated.watched():  # a block may be computed again
            # `reach` ties the loss to every parameter: DDP and FSDP2 must come to each, also to those of a branch not
            # taken.
            backward(self._used.reach(loss))
        self.repeated.check(_times(len(micro_batches), self.parts.layout))
        # ZeRO-1: wait for the sums of the shard group. They arrive on each parameter's owner; other ranks get zeros.
        if self.parts.owners is not None:
            self.parts.owners.settle()
        # Every rank tells which parameters it used along with its embeddings' rows, which is one message less.
        used_by_any = None if self._rows is None else self._rows.exchange(self._used.noted())
        average_experts(self.model, self.parts)  # while it is not taken away yet where only others used them
        # From here on `grad is None` means that no rank used a parameter, as one process would have it.
        if used_by_any is None:
            self._used.settle()
        else:
            self._used.forget(used_by_any)
        # Owners of different replicas add up theirs only now: the sums of the shard group had to be there first.
        if self.parts.owners is not None:
            self.parts.owners.sum_replicas(self.model.parameters())
        self.buffers.settle()
        if not self._buffers_checked:
            self._buffers_checked = True
            check_buffers(self.model, before, self.parts.mesh.data_group)
            self.watch_draws(buffers_moved=before != versions(self.model))
        # FSDP2 has reduced what it shards; scalars and the like are whole on every rank, and are averaged here.
        if self.parts.layout.zero >= 2:
            average_what_is_whole(self.model, self.parts)
        # Sums over tensor and context ranks, of parameters of which each had a part of the gradient. Last, since
        # averages over data ranks and sums over these commute, and FSDP2's shards are smaller than what it gathered.
        self.parts.sum_gradients(self.model)

    def sum_along(self, totals: Tensor) -> bool:
        return self._rows is None and self._used.sum_along(totals)

    def watch_draws(self, *, buffers_moved: bool) -> None:
        """Decide after a first step whether forwards are still watched for draws."""
        self._watches_draws = not self._repeatable or self.now.drew or buffers_moved

    def forward(self, micro_batch: MicroBatch, term: Term) -> Tensor:
        """A training forward of one micro-batch, up to the loss's term []; waits for late parameters as it goes."""
        if self.late is not None:
            self.late.begin()
        with self.now.at(micro_batch.moment), self.autocast():
            output = self._output(micro_batch.batch.inputs)
            self.settle()  # the loss may look at parameters that this forward did not use
            return term(output, micro_batch)

    def _output(self, inputs: Any) -> Any:
        """The model's output. Watching a forward for draws costs time, and few models draw that have never drawn."""
        if self._watches_draws:
            return call(self.module, inputs)
        device = torch.device(self.parts.mesh.grid.device_type)
        before = generators.state_of_torch(device)
        with self.now.unwatched():
            output = call(self.module, inputs)
        if generators.moved(before, generators.state_of_torch(device)) is None:
            return output
        # The forward drew after all. Generators go back to where they were, and the forward is run again, watched;
        # what the first try left in buffers is excluded by `watch_draws`.
        self._watches_draws = True
        generators.restore_torch(before, device)
        return call(self.module, inputs)

    def predict(self, inputs: Any) -> Any:
        """A forward without gradients, in the model's mode; every rank of the model calls it."""
        self.settle()
        with torch.no_grad(), self.autocast():
            output = call(self.model, inputs)
        # A forward without a backward leaves FSDP2's parameters gathered.
        put_back(self.model)
        return output


def _times(micro_batches: int, layout: Layout) -> str:
    again = f", and recompute={layout.recompute} another in backward" * (layout.recompute != "none")
    return f"a step of this rank runs {micro_batches} forward{'s' * (micro_batches > 1)}{again}"
