"""Pipeline: a model whose layers are on several ranks, which work on different micro-batches at the same time.

One step on one rank:

    1. `orders_of` gives the actions of all ranks; from them follow all messages (`_sends`), known to both sides.
    2. The rank runs its own actions one after the other. A forward waits for its activations, runs the stage, sends
       on; a backward waits for the gradients of what was sent on, runs, and sends back the gradients of its inputs.
    3. A stage's graph is alive between its forward and its backward (`_alive`): under 1F1B at most as many of them as
       there are stages from here to the end, under GPipe as many as there are micro-batches.
    4. After the last action: gradients over tensor and context ranks and over stages that share a parameter
       (`sum_gradients`), and over replicas (`EarlyGradients` while backward runs; FSDP2 by itself).

The loss is computed on the rank of the last stage. `forwards_done` is called on every rank, as loss and count are
summed over `loss_group`, in which ranks without the last stage have zeros.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from samestep.comm.mesh import Mesh
from samestep.data.loader import MicroBatch
from samestep.layout import Layout
from samestep.parallel.ddp import average_experts, average_gradients, average_what_is_whole
from samestep.parallel.exact.batch_norm import divided
from samestep.parallel.fsdp import put_back
from samestep.parallel.parallel_model import ParallelModel, Term
from samestep.parallel.pipeline.early_gradients import EarlyGradients
from samestep.parallel.pipeline.p2p import MessageId, StageMessages, has_gradient
from samestep.parallel.pipeline.schedule import Action, Orders, backward_in_two, orders_of, owners
from samestep.parallel.pipeline.stage import StagedModel
from samestep.parallel.pipeline.timeline import Timeline
from samestep.parallel.pipeline.units import UnitOutput
from samestep.parallel.unused_parameters import UnusedParameters
from samestep.profiling.clock import Phase
from samestep.torch_internals import pytree


class Pipeline(ParallelModel):
    """A pipeline-parallel model, which runs this rank's forwards and backwards in the order of a schedule."""

    def __init__(
        self,
        *,
        cut: StagedModel,
        layout: Layout,
        mesh: Mesh,
        device: torch.device,
        bucket_mb: float | None = None,
        undivided: str | None = None,
        used: UnusedParameters | None = None,
        **common: Any,
    ) -> None:
        """`bucket_mb`: size of gradient buckets in MiB; None: 25.

        `undivided`: a batch norm of any stage, for which a step has one micro-batch. `used`: of sharded stages.
        """
        super().__init__(**common)
        self.timeline = self.times = Timeline(layout, mesh.group("pipeline"), device)
        self.cut = cut
        self._undivided = undivided
        self._used = used
        self._layout = layout
        self._mesh = mesh
        self._last_stage = cut.plan.stages - 1
        counts = [len(of_stage) for of_stage in cut.plan.handed_on]
        self._messages = StageMessages(mesh, owners(layout), counts, device)
        self._chunk_orders = _forwards_alone(owners(layout), layout.pipeline)
        self._bucket_mb = bucket_mb
        self._early: EarlyGradients | None = None
        # Parameters whose gradients are sums over other ranks before replicas average them.
        self._summed: list[nn.Parameter] = []

    def forward_backward(
        self,
        micro_batches: Sequence[MicroBatch],
        *,
        term: Term,
        backward: Callable[[Tensor], None],
        forwards_done: Callable[[], None],
    ) -> None:
        """Run one step of this rank's stages; see the module's docstring."""
        if self._undivided is not None and len(micro_batches) > 1:
            raise divided(self._undivided, len(micro_batches))  # on every rank, before one waits for another
        orders = orders_of(
            self._layout.schedule,
            ranks=self._layout.pipeline,
            stages_a_rank=self._layout.stages_a_rank,
            micro_batches=len(micro_batches),
        )
        order = orders[self._mesh.coordinate("pipeline")]
        keys = [_shapes(micro_batch.batch.inputs) for micro_batch in micro_batches]
        # Forms of activations depend on the shapes of the micro-batch's inputs, so these are the key.
        self._messages.begin(_sends(orders, self._last_stage), lambda message: keys[message.micro_batch])
        early = self._early_gradients()
        if early is not None:
            early.begin(order)
        with self.times.of_step(micro_batches[0].moment.step, orders):
            self._run_actions(order, _Step(self, micro_batches, term, backward), early, forwards_done)
        # Wait for all sends, so that their memory may be freed and written to.
        self._messages.finish()
        self.buffers.settle()
        self.repeated.check(f"a pipeline's step runs {len(micro_batches)} forwards of each stage")
        self._average(early)

    def _run_actions(
        self,
        actions: Sequence[Action],
        step: "_Step",
        early: EarlyGradients | None,
        forwards_done: Callable[[], None],
    ) -> None:
        """Run this rank's actions; calls `forwards_done` once the losses of all micro-batches are computed."""
        last_term = _last(actions, lambda action: action.kind == "F" and action.stage == self._last_stage)
        last_backward = _last(actions, lambda action: action.kind == "B")
        for number, action in enumerate(actions):
            if early is not None:
                early.before(number, action)
            if isinstance(self.cut, FSDPModule):
                # Shards add gradients up on this rank, and exchange them once. With ZeRO-2, which holds all
                # parameters from forward to backward anyway, they are gathered once as well.
                self.cut.set_requires_gradient_sync(number == last_backward)
                self.cut.set_reshard_after_backward(self._layout.zero == 3 or number == last_backward)
            # The second micro-batch's forward, or its recomputation, runs what has run before in this step.
            phase: Phase = "forward" if action.kind == "F" else "backward"
            timed = nullcontext() if self.clock is None else self.clock.of(phase)
            with self.repeated.watched() if action.micro_batch == 1 else nullcontext(), timed:
                step.run(action)
            if early is not None:
                early.after(number, action)
            if number == last_term:
                forwards_done()
        if last_term is None:  # without the last stage this rank adds nothing to the totals
            forwards_done()

    def _average(self, early: EarlyGradients | None) -> None:
        """Sum gradients over the ranks that hold parts of them, and average them over replicas."""
        if self._used is not None:
            self._used.settle()
        # Before averages over replicas, which begin for these parameters only now (`_summed`): the order is the same
        # on every rank.
        self.parts.sum_gradients(self.model)
        if isinstance(self.cut, FSDPModule):
            average_what_is_whole(self.model, self.parts)
        if early is not None:
            early.finish()
            summed = self._summed
            if summed and self.parts.owners is not None:
                self.parts.owners.average(summed)
            elif summed:
                average_gradients(summed, self._mesh.data_group, self._mesh.grid.device_type)
        average_experts(self.model, self.parts)

    def _early_gradients(self) -> EarlyGradients | None:
        """The averaging of gradients over replicas; made in the first step, when ZeRO-1's owners are known."""
        if self._mesh.data_place.of == 1 or isinstance(self.cut, FSDPModule):
            return None
        if self._early is None:
            named = self.model.named_parameters()
            shared = {name: p for name, p in named if not self.parts.part(name).of_experts}
            self._summed = [p for name, p in shared.items() if self.parts.part(name).sum_over]
            self._early = EarlyGradients(
                [p for name, p in shared.items() if not self.parts.part(name).sum_over],
                {stage: self.cut.weights_of(stage) for stage in self.cut.mine},
                mesh=self._mesh,
                owners=self.parts.owners,
                bucket_mb=self._bucket_mb,
            )
        return self._early

    def forward(self, stage: int, inputs: Any, received: Sequence[Tensor]) -> Any:
        """Run a stage. Returns the tensors that it computes and passes on; for the last stage the model's output.

        `received`: all tensors that the stage before passed on.
        """
        plan = self.cut.plan
        before = plan.handed_on[stage - 1] if stage else ()
        # `received` includes tensors that are only carried along; the forward gets those that this stage uses.
        tensors = dict(zip(before, received, strict=True))
        with self.autocast():
            return self.cut(stage, inputs, [tensors[output] for output in plan.taken(stage)])

    def passed_on(self, stage: int, computed: Sequence[Any], received: Sequence[Any]) -> list[Any]:
        """The tensors that a stage passes to the next, computed and carried along, in the plan's order."""
        plan = self.cut.plan
        own = [output for output in plan.handed_on[stage] if plan.stage_of_call(output.caller) == stage]
        tensors = dict(zip(own, computed, strict=True))
        tensors |= zip(plan.handed_on[stage - 1] if stage else (), received, strict=True)
        return [tensors[output] for output in plan.handed_on[stage]]

    def receive(self, message: MessageId) -> list[Tensor]:
        return self._messages.receive(message)

    def send(self, message: MessageId, tensors: Sequence[Tensor]) -> None:
        self._messages.send(message, tensors)

    def predict(self, inputs: Any) -> Any:
        """The output of a chunk, on the rank of the last stage; None on the others. Every rank calls."""
        output = None
        shapes = _shapes(inputs)
        self._messages.begin(_sends(self._chunk_orders, self._last_stage), lambda message: shapes)
        with torch.no_grad():
            for stage in self.cut.mine:
                received = self.receive(MessageId(to=stage, kind="F", micro_batch=0)) if stage else []
                result = self.forward(stage, inputs, received)
                if stage < self._last_stage:
                    message = MessageId(to=stage + 1, kind="F", micro_batch=0)
                    self.send(message, self.passed_on(stage, result, received))
                else:
                    output = result
        # Evaluation has many chunks: the first stages may run ahead of the last by one chunk.
        self._messages.finish(turns_ago=1)  # this chunk's sends may still be pending
        put_back(self.cut)
        return output


@dataclass(kw_only=True)
class _Alive:
    """A forward whose backward is pending: the leaves and the roots of its graph."""

    received: list[Tensor]
    roots: list[Tensor]  # the tensors that the stage computed and passed on; for the last stage the loss


class _Step:
    """The actions of one step on one rank, and the state between them."""

    def __init__(
        self,
        pipeline: Pipeline,
        micro_batches: Sequence[MicroBatch],
        term: Term,
        backward: Callable[[Tensor], None],
    ) -> None:
        self._pipeline = pipeline
        self._micro_batches = micro_batches
        self._term = term
        self._backward = backward
        self._last_stage = pipeline.cut.plan.stages - 1
        self._alive: dict[tuple[int, int], _Alive] = {}
        self._of_weights: dict[tuple[int, int], Callable[[], None]] = {}

    def run(self, action: Action) -> None:
        """Run one action."""
        if action.kind == "F":
            self._forward(action)
            return
        backwards = {"B": self._whole_backward, "I": self._input_backward, "W": self._weight_backward}
        with self._pipeline.cut.in_backward_of(action.stage):
            backwards[action.kind](action)

    def _forward(self, action: Action) -> None:
        """Receive, run the stage with a graph, and send; the graph is kept as `_Alive`."""
        pipeline, stage = self._pipeline, action.stage
        received = self._received("F", action) if stage else []
        # Leaves of this stage's graph: backward leaves their gradients in `.grad`, and these are sent back.
        for tensor in received:
            tensor.requires_grad_(has_gradient(tensor))
        micro_batch = self._micro_batches[action.micro_batch]
        with pipeline.times.of(action), pipeline.forward_context.at(micro_batch.moment):
            roots = pipeline.forward(stage, micro_batch.batch.inputs, received)
            if stage == self._last_stage:
                with pipeline.autocast():
                    # The scaled loss term of the micro-batch, from which backward starts.
                    roots = [self._term(roots, micro_batch)]
        if stage < self._last_stage:
            message = MessageId(to=stage + 1, kind="F", micro_batch=action.micro_batch)
            pipeline.send(message, pipeline.passed_on(stage, roots, received))
        self._alive[stage, action.micro_batch] = _Alive(received=received, roots=roots)

    def _whole_backward(self, action: Action) -> None:
        """Receive gradients, run backward to weights and inputs, send the inputs' gradients back."""
        alive, gradients, carried = self._ends(action)
        with self._pipeline.times.of(action):
            self._all_gradients(action, alive.roots, gradients)
        self._hand_back(action, alive.received, carried)

    def _all_gradients(self, action: Action, roots: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        if action.stage == self._last_stage:
            self._backward(roots[0])
            return
        trained = [(root, gradient) for root, gradient in zip(roots, gradients, strict=True) if root.requires_grad]
        if trained:
            torch.autograd.backward([root for root, _ in trained], [gradient for _, gradient in trained])

    def _input_backward(self, action: Action) -> None:
        """Run backward to the received tensors only, for which the stage before waits; weights follow later."""
        alive, gradients, carried = self._ends(action)
        last = action.stage == self._last_stage
        weights = self._pipeline.cut.weights_of(action.stage)
        with self._pipeline.times.of(action):
            later = backward_in_two(alive.roots, None if last else gradients, alive.received, weights)
        self._of_weights[action.stage, action.micro_batch] = later
        self._hand_back(action, alive.received, carried)

    def _weight_backward(self, action: Action) -> None:
        """Compute the gradients of the weights that `_input_backward` deferred."""
        with self._pipeline.times.of(action):
            self._of_weights.pop((action.stage, action.micro_batch))()

    def _ends(self, action: Action) -> tuple[_Alive, list[Tensor], dict[UnitOutput, Tensor]]:
        """Receive gradients: a forward's graph, the gradients of its roots, and those of carried-along tensors."""
        alive, stage = self._alive.pop((action.stage, action.micro_batch)), action.stage
        if stage == self._last_stage:
            return alive, [], {}
        plan = self._pipeline.cut.plan
        handed_on = plan.handed_on[stage]
        # Gradients in the order in which the activations were passed on, for those that can have one.
        forms = iter(self._received("B", action))
        own = iter(alive.roots)
        carried_along = dict(zip(plan.handed_on[stage - 1] if stage else (), alive.received, strict=True))
        gradients: list[Tensor] = []
        carried: dict[UnitOutput, Tensor] = {}
        ends: list[Tensor] = []
        for output in handed_on:
            computed_here = plan.stage_of_call(output.caller) == stage
            tensor = next(own) if computed_here else carried_along[output]
            if not has_gradient(tensor):
                continue
            if computed_here:
                ends.append(tensor)
                gradients.append(next(forms))
            else:
                carried[output] = next(forms)
        alive.roots = ends
        return alive, gradients, carried

    def _received(self, kind: str, action: Action) -> list[Tensor]:
        return self._pipeline.receive(MessageId(to=action.stage, kind=kind, micro_batch=action.micro_batch))

    def _hand_back(self, action: Action, received: Sequence[Tensor], carried: Mapping[UnitOutput, Tensor]) -> None:
        """Send back the gradients of received tensors, summed over this stage and the stages after it."""
        if not action.stage:
            return
        gradients = []
        for output, tensor in zip(self._pipeline.cut.plan.handed_on[action.stage - 1], received, strict=True):
            if not has_gradient(tensor):
                continue
            # The gradient of this stage's use of the tensor, plus that of later stages' uses.
            parts = [part for part in (tensor.grad, carried.get(output)) if part is not None]
            gradients.append(sum(parts[1:], parts[0]) if parts else torch.zeros_like(tensor))
        message = MessageId(to=action.stage - 1, kind="B", micro_batch=action.micro_batch)
        self._pipeline.send(message, gradients)


def _sends(orders: Orders, last_stage: int) -> list[list[MessageId]]:
    """The messages of each rank in its order of sending, including those to itself."""
    sends: list[list[MessageId]] = []
    for actions in orders:
        messages = []
        for action in actions:
            if action.kind == "F" and action.stage < last_stage:
                messages.append(MessageId(to=action.stage + 1, kind="F", micro_batch=action.micro_batch))
            if action.kind in ("B", "I") and action.stage:
                messages.append(MessageId(to=action.stage - 1, kind="B", micro_batch=action.micro_batch))
        sends.append(messages)
    return sends


def _forwards_alone(rank_of: Sequence[int], ranks: int) -> Orders:
    """The actions of a chunk of an evaluation: one forward of each stage."""
    return [
        [Action(stage=stage, kind="F", micro_batch=0) for stage, owner in enumerate(rank_of) if owner == rank]
        for rank in range(ranks)
    ]


def _last(actions: Sequence[Action], condition: Callable[[Action], bool]) -> int | None:
    return max((number for number, action in enumerate(actions) if condition(action)), default=None)


def _shapes(inputs: Any) -> Any:
    """The shapes and dtypes of the inputs, on which the forms of activations depend."""
    leaves = pytree.tree_leaves(dict(inputs) if hasattr(inputs, "keys") else inputs)
    return tuple((tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else None for leaf in leaves)
