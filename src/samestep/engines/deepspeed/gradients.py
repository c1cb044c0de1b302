"""The gradients of a step on a DeepSpeed engine, which must be multiplied once the count of terms is known.

Which parameters a loss depends on is found in autograd's graph before a backward sends anything. ZeRO 3 gathers a
layer's parameters when it runs, so all ranks must run the same layers in the same order.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from samestep.comm.mesh import Mesh
from samestep.errors import UserError
from samestep.parallel.unused_parameters import UnusedParametersOfReplicas
from samestep.torch_internals import foreach

# What hides a part of the graph, which it makes in backward: reentrant checkpoints, PyTorch's and DeepSpeed's.
_HIDING = "CheckpointFunctionBackward"


def reached(loss: Tensor) -> set[int] | None:
    """The ids of the parameters that a loss depends on; None if reentrant checkpoints hide a part of the graph."""
    nodes: list[Any] = [loss.grad_fn]
    seen: set[Any] = set()
    parameters: set[int] = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        kind = type(node).__name__
        if kind == _HIDING:
            return None
        if kind == "AccumulateGrad":
            parameters.add(id(node.variable))
        nodes.extend(before for before, _ in node.next_functions)
    return parameters


def digest(numbers: list[int]) -> Tensor:
    """A hash and its negative: after an all-reduce by maximum their sum is 0 only if all ranks have the same hash."""
    value = hash(tuple(numbers)) & 0x7FFFFFFFFFFFFFFF
    return torch.tensor([value, -value])


_END = -1  # of a forward, where others run one layer more


class SameOrder:
    """Raises UserError when ranks are about to run different layers, which would deadlock in ZeRO 3's all-gathers.

    In the first forward the ranks compare each layer by an all-reduce. Later forwards must run the layers of the
    first one, which each rank checks alone. Construct it before DeepSpeed puts its own hooks on the layers.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._names: list[str] = []
        self._orders: dict[bool, list[int]] = {}  # of training, and of evaluation
        self._running: list[int] | None = None  # the layers of this forward so far
        self._training = True
        for name, module in model.named_modules():
            if any(True for _ in module.parameters(recurse=False)):
                module.register_forward_pre_hook(partial(self._run, len(self._names)))
                self._names.append(name)

    @contextmanager
    def forward(self, *, training: bool) -> Iterator[None]:
        """Context of one forward, whose layers are checked."""
        self._running, self._training = [], training
        try:
            yield
            self._go_on(_END)
            self._orders.setdefault(training, self._running)
        finally:
            self._running = None

    def _run(self, number: int, module: nn.Module, arguments: Any) -> None:
        """Forward pre-hook of a module with parameters: check that all ranks run the same one."""
        if self._running is not None:
            self._go_on(number)
            self._running.append(number)

    def _go_on(self, number: int) -> None:
        """Raise UserError if this rank is about to run another layer than other ranks, or than the first forward."""
        assert self._running is not None
        order = self._orders.get(self._training)
        if order is None:
            both = torch.tensor([number, -number], device=self._device)
            dist.all_reduce(both, dist.ReduceOp.MAX, group=self._group)
            alike = bool(both.sum() == 0)
        else:
            expected = order[len(self._running)] if len(self._running) < len(order) else _END
            alike = number == expected
        if not alike:
            what = "ends" if number == _END else f"runs {self._names[number] or 'the model'}"
            others = "other ranks" if order is None else "the first forward"
            raise UserError(
                f"engine deepspeed: a forward {what} where {others} did not, and ZeRO 3 gathers a layer's parameters "
                "from all ranks when it runs, so they would wait for ever; "
                "use layout dp, or a model that runs the same layers in every forward"
            )


def gradients_of(engine: Any, mesh: Mesh) -> "Gradients":
    """Make the access to an engine's gradients for its ZeRO stage."""
    return ShardedGradients(engine, mesh) if engine.zero_optimization() else WholeGradients(engine, mesh)


class Gradients(ABC):
    """Where a stage keeps the step's gradient, which must be multiplied once the count of terms is known.

    Backward starts before the ranks have counted their terms (unmasked tokens, say), so it leaves sum / samples.
    """

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss, multiplied by the fp16 scale if DeepSpeed's backward does not do so."""
        return loss

    def check_before_backward(self, loss: Tensor, *, last: bool) -> None:
        """Raise UserError, on every rank, for a backward that would deadlock.

        `last`: whether this is the step's last backward on this rank.
        """
        return

    def check_before_reducing(self) -> None:
        """Raise UserError, on every rank, if the exchange of gradients after all backwards would deadlock."""
        return

    def unused(self) -> int:
        """The number of parameters that need a gradient in every step and got none on this rank."""
        return 0

    @abstractmethod
    def settle(self, factor: float) -> None:
        """Multiply the gradient, after the last backward and before the step. Raises UserError if it can't be."""

    @abstractmethod
    def norm_after_step(self) -> float | Tensor:
        """The whole gradient's norm as it was before clipping."""


class WholeGradients(Gradients):
    """Stage 0: every rank has the whole gradient of what it computes with, in the parameters."""

    def __init__(self, engine: Any, mesh: Mesh) -> None:
        self._engine = engine
        self._mesh = mesh
        self._used = UnusedParametersOfReplicas(engine.module, mesh.data_group)
        self._norm = torch.zeros(())

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss times DeepSpeed's scale, under stage 0."""
        # DeepSpeed's engine scales for ZeRO alone (0.19), yet its optimizer for stage 0 divides by the scale as well.
        scale = _loss_scale(self._engine)
        return loss if scale == 1 else loss.float() * scale

    def settle(self, factor: float) -> None:
        """Multiply whole gradients by the factor for the count, and take their norm over pipeline ranks.

        Under stage 0 every rank has every gradient of its stages.
        """
        self._used.settle()
        gradients = [p.grad for p in self._engine.module.parameters() if p.grad is not None]
        if factor != 1:
            foreach.mul_(gradients, factor)
        norms = foreach.norm([gradient.float() for gradient in gradients])
        squares = torch.stack(norms).double().square().sum()
        if self._mesh.size("pipeline") > 1:
            dist.all_reduce(squares, group=self._mesh.group("pipeline"))
        self._norm = squares.sqrt() / _loss_scale(self._engine)

    def norm_after_step(self) -> Tensor:
        return self._norm


class ShardedGradients(Gradients):
    """Stages 1 to 3: DeepSpeed keeps shards of it, and divides them by the scale of the loss when it steps.

    That scale is one over the factor then, times the one that fp16 was scaled by.
    """

    def __init__(self, engine: Any, mesh: Mesh) -> None:
        self._engine = engine
        self._mesh = mesh
        named = [(name, p) for name, p in engine.module.named_parameters() if p.requires_grad]
        self._names = [name for name, _ in named]
        self._numbers = {id(parameter): number for number, (_, parameter) in enumerate(named)}
        self._seen: set[int] = set()
        self._expected: set[int] = set()
        for number, (_, parameter) in enumerate(named):
            parameter.register_hook(self._note(number))

    def _note(self, number: int) -> Any:
        """Make a gradient hook that records the parameter's number."""

        def note(gradient: Tensor) -> None:
            self._seen.add(number)

        return note

    def check_before_backward(self, loss: Tensor, *, last: bool) -> None:
        """Raise UserError where ranks are about to send gradients of different parameters."""
        # A rank's samples may choose which layers run. ZeRO sends the gradients that there are: from stage 2 on in
        # each backward, and in stage 1 in the last.
        if self._mesh.data_place.of == 1:
            return
        parameters = reached(loss)
        everything = set(self._numbers.values())
        self._expected |= (
            everything if parameters is None else {self._numbers[p] for p in parameters if p in self._numbers}
        )
        if last or self._engine.zero_optimization_stage() > 1:
            self._check_alike(self._expected)
            self._expected = set()

    def check_before_reducing(self) -> None:
        """Check a pipeline, whose gradients are exchanged once, after all backwards."""
        if self._mesh.data_place.of > 1:
            self._check_alike(self._seen)

    def _check_alike(self, numbers: set[int]) -> None:
        """Raise UserError on every rank if the ranks are about to send gradients of different parameters."""
        device = next(self._engine.module.parameters()).device
        digests = digest(sorted(numbers)).to(device)
        dist.all_reduce(digests, dist.ReduceOp.MAX, group=self._mesh.data_group)
        if digests.sum() == 0:
            return
        ranks: list[Any] = [None] * self._mesh.data_place.of
        dist.all_gather_object(ranks, [self._names[number] for number in numbers], group=self._mesh.data_group)
        apart = sorted(set[str]().union(*ranks) - set[str](ranks[0]).intersection(*ranks))
        raise UserError(
            f"engine deepspeed: in a step some ranks' samples used parameters that others' did not "
            f"({', '.join(apart[:3])}{', ...' if apart[3:] else ''}), for whose gradients ZeRO would wait for ever; "
            "use layout dp, or a model that uses all its parameters in every step"
        )

    def unused(self) -> int:
        """How many parameters this rank's backward did not reach in this step."""
        missing = len(self._names) - len(self._seen)
        self._seen.clear()
        return missing

    def settle(self, factor: float) -> None:
        """Multiply by the factor through DeepSpeed's loss scale: its step divides shards by that."""
        optimizer = self._engine.optimizer
        scale = _loss_scale(self._engine)
        if factor != 1 or scale != 1:
            optimizer.override_loss_scale(scale / factor)

    def norm_after_step(self) -> float | Tensor:
        """DeepSpeed's norm of the step; its loss scaler is its own again."""
        self._engine.optimizer.custom_loss_scaler = False
        return self._engine.get_global_grad_norm()


def _loss_scale(engine: Any) -> float:
    """What DeepSpeed multiplied the loss by, so that small gradients don't vanish in fp16."""
    scale = engine._get_optimizer_loss_scale()
    return 1.0 if scale is None else float(scale)
