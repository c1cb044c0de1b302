"""Pipeline: a model whose layers are on several ranks, which work on different micro-batches at the same time."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.utils import _pytree as pytree

from samestep.comm.mesh import Mesh
from samestep.data.loader import MicroBatch
from samestep.layout import Layout
from samestep.parallel.average import average_experts, average_gradients, average_what_is_whole
from samestep.parallel.pipeline.cut import Cut
from samestep.parallel.pipeline.messages import Letter, Messages
from samestep.parallel.pipeline.orders import Action, Orders, backward_in_two, orders_of
from samestep.parallel.pipeline.rules import owners
from samestep.parallel.pipeline.timeline import Timeline
from samestep.parallel.shard import put_back
from samestep.parallel.spread import Spread, Term
from samestep.profiling.clock import Phase


class Pipeline(Spread):
    """Each rank runs its stages' forwards and backwards in the order of a schedule."""

    def __init__(
        self,
        *,
        cut: Cut,
        layout: Layout,
        mesh: Mesh,
        device: torch.device,
        **common: Any,
    ) -> None:
        super().__init__(**common)
        self.timeline = self.times = Timeline(layout, mesh.group("pipeline"), device)
        self.cut = cut
        self._layout = layout
        self._mesh = mesh
        self._last_stage = cut.plan.stages - 1
        self._messages = Messages(mesh, owners(layout), device)
        self._chunk_orders = _forwards_alone(owners(layout), layout.pipeline)

    def take(
        self,
        micro_batches: Sequence[MicroBatch],
        *,
        term: Term,
        backward: Callable[[Tensor], None],
        forwards_done: Callable[[], None],
    ) -> None:
        orders = orders_of(
            self._layout.schedule,
            ranks=self._layout.pipeline,
            stages_a_rank=self._layout.stages_a_rank,
            micro_batches=len(micro_batches),
        )
        step = _Step(self, micro_batches, term, backward)
        mine = orders[self._mesh.coordinate("pipeline")]
        last_term = _last(mine, lambda action: action.kind == "F" and action.stage == self._last_stage)
        last_backward = _last(mine, lambda action: action.kind == "B")
        keys = [_shapes(micro_batch.batch.inputs) for micro_batch in micro_batches]
        self._messages.begin(_sends(orders, self._last_stage), lambda letter: keys[letter.micro_batch])
        with self.times.of_step(micro_batches[0].moment.step, orders):
            for number, action in enumerate(mine):
                if isinstance(self.cut, FSDPModule):
                    # Shards add gradients up on this rank, and exchange them once.
                    self.cut.set_requires_gradient_sync(number == last_backward)
                # The second micro-batch's forward, or its recomputation, runs what has run before in this step.
                phase: Phase = "forward" if action.kind == "F" else "backward"
                timed = nullcontext() if self.clock is None else self.clock.of(phase)
                with self.repeated.watched() if action.micro_batch == 1 else nullcontext(), timed:
                    step.run(action)
                if number == last_term:
                    forwards_done()
        if last_term is None:
            forwards_done()
        self._messages.finish()
        self.buffers.settle()
        self.repeated.check(f"a pipeline's step runs {len(micro_batches)} forwards of each stage")
        self.parts.sum_gradients(self.model)
        if self.parts.owners is not None:
            self.parts.owners.average(self.parts.not_of_experts(self.model))
        elif isinstance(self.cut, FSDPModule):
            average_what_is_whole(self.model, self.parts)
        elif self._mesh.data_place.of > 1:
            shared = self.parts.not_of_experts(self.model)
            average_gradients(shared, self._mesh.data_group, self._mesh.grid.device_type)
        average_experts(self.model, self.parts)

    def forward(self, stage: int, inputs: Any, received: Tensor | None) -> Any:
        """What a stage gives, computed with its rank's part of the model."""
        with self.autocast():
            return self.cut(stage, inputs, received)

    def receive(self, letter: Letter) -> Tensor:
        return self._messages.receive(letter)

    def send(self, letter: Letter, tensor: Tensor) -> None:
        self._messages.send(letter, tensor)

    def predict(self, inputs: Any) -> Any:
        output = None
        shapes = _shapes(inputs)
        self._messages.begin(_sends(self._chunk_orders, self._last_stage), lambda letter: shapes)
        with torch.no_grad():
            for stage in self.cut.mine:
                received = self.receive(Letter(to=stage, kind="F", micro_batch=0)) if stage else None
                result = self.forward(stage, inputs, received)
                if stage < self._last_stage:
                    self.send(Letter(to=stage + 1, kind="F", micro_batch=0), result)
                else:
                    output = result
        self._messages.finish(turns_ago=1)  # what was sent for this chunk may take its time
        put_back(self.cut)
        return output


class _Step:
    """The forwards and backwards of one step on one rank, and what lies between them."""

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
        # Of each forward whose backward is to come: what it received, and the end of its graph.
        self._alive: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}
        self._of_weights: dict[tuple[int, int], Callable[[], None]] = {}

    def run(self, action: Action) -> None:
        {"F": self._forward, "B": self._whole_backward, "I": self._input_backward, "W": self._weight_backward}[
            action.kind
        ](action)

    def _forward(self, action: Action) -> None:
        pipeline, stage = self._pipeline, action.stage
        received = self._received(stage, "F", action)
        if received is not None:
            received.requires_grad_()
        micro_batch = self._micro_batches[action.micro_batch]
        with pipeline.times.of(action), pipeline.now.at(micro_batch.moment):
            root = pipeline.forward(stage, micro_batch.batch.inputs, received)
            if stage == self._last_stage:
                with pipeline.autocast():
                    root = self._term(root, micro_batch)
        if stage < self._last_stage:
            pipeline.send(Letter(to=stage + 1, kind="F", micro_batch=action.micro_batch), root)
        self._alive[stage, action.micro_batch] = (received, root)

    def _whole_backward(self, action: Action) -> None:
        gradient, received, root = self._ends(action)
        with self._pipeline.times.of(action):
            if gradient is None:
                self._backward(root)
            elif root.requires_grad:
                root.backward(gradient)
        self._hand_back(action, received)

    def _input_backward(self, action: Action) -> None:
        gradient, received, root = self._ends(action)
        assert received is not None
        weights = self._pipeline.cut.weights_of(action.stage)
        with self._pipeline.times.of(action):
            # The root is cut from its graph in place, which no view allows.
            root = root.clone() if root._is_view() else root
            later = backward_in_two(root, gradient, received, weights)
        self._of_weights[action.stage, action.micro_batch] = later
        self._hand_back(action, received)

    def _weight_backward(self, action: Action) -> None:
        with self._pipeline.times.of(action):
            self._of_weights.pop((action.stage, action.micro_batch))()

    def _ends(self, action: Action) -> tuple[Tensor | None, Tensor | None, Tensor]:
        received, root = self._alive.pop((action.stage, action.micro_batch))
        gradient = None if action.stage == self._last_stage else self._received(action.stage, "B", action)
        return gradient, received, root

    def _received(self, stage: int, kind: str, action: Action) -> Tensor | None:
        if kind == "F" and stage == 0:
            return None
        return self._pipeline.receive(Letter(to=stage, kind=kind, micro_batch=action.micro_batch))

    def _hand_back(self, action: Action, received: Tensor | None) -> None:
        if received is None:
            return
        gradient = torch.zeros_like(received) if received.grad is None else received.grad
        letter = Letter(to=action.stage - 1, kind="B", micro_batch=action.micro_batch)
        self._pipeline.send(letter, gradient)


def _sends(orders: Orders, last_stage: int) -> list[list[Letter]]:
    """What each rank sends, or hands to itself, in its order."""
    found: list[list[Letter]] = []
    for actions in orders:
        letters = []
        for action in actions:
            if action.kind == "F" and action.stage < last_stage:
                letters.append(Letter(to=action.stage + 1, kind="F", micro_batch=action.micro_batch))
            if action.kind in ("B", "I") and action.stage:
                letters.append(Letter(to=action.stage - 1, kind="B", micro_batch=action.micro_batch))
        found.append(letters)
    return found


def _forwards_alone(rank_of: Sequence[int], ranks: int) -> Orders:
    """The order of a chunk without gradients: each stage once."""
    return [
        [Action(stage=stage, kind="F", micro_batch=0) for stage, owner in enumerate(rank_of) if owner == rank]
        for rank in range(ranks)
    ]


def _last(actions: Sequence[Action], wanted: Callable[[Action], bool]) -> int | None:
    return max((number for number, action in enumerate(actions) if wanted(action)), default=None)


def _shapes(inputs: Any) -> Any:
    """What the form of a hidden state depends on."""
    leaves = pytree.tree_leaves(dict(inputs) if hasattr(inputs, "keys") else inputs)
    return tuple((tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else None for leaf in leaves)
