"""A trial: the task's model in one process, called as a training step calls it, with its draws answered by sample.

Two things that no layout can follow are found on the way: parameters that lie where PyTorch doesn't look for them
(`held_in`), and writes to parameters in a forward (`Writes`).
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from samestep.contract.errors import ContractError, at, line_of, said
from samestep.contract.samples import Sampled, take_others
from samestep.data.loader import Moment, on_device
from samestep.data.nests import equal, map_tensors
from samestep.data.types import Batch, splits_of
from samestep.engines.precision import Precision
from samestep.job import Job
from samestep.layout import Layout
from samestep.parallel.deferred_init import move
from samestep.parallel.exact import generators
from samestep.parallel.exact.batch_norm import by_running_statistics, global_batch_norm
from samestep.parallel.exact.buffers import keep_no_cache
from samestep.parallel.exact.dropout import Dropout, same_dropout
from samestep.parallel.exact.forward_context import ForwardContext
from samestep.parallel.exact.generators import is_foreign
from samestep.parallel.loss.coupled import CallRows, Coupling
from samestep.tasks.base import InTurn, Task, call
from samestep.tasks.losses import takes_gather, task_loss
from samestep.tasks.memory_budget import Budget
from samestep.tasks.turns import Turn
from samestep.torch_internals import pytree
from samestep.torch_internals.modules import REGISTRIES
from samestep.torch_internals.operators import TorchDispatchMode, arguments_by_name, schema
from samestep.training.evaluation import switch_off
from samestep.training.fit import build_model

MODEL, FORWARD, LOSS = "model", "forward", "loss"

LossAndGradients = tuple[Tensor, tuple[Tensor | None, ...]]  # None: of a parameter that the loss doesn't reach


class Trial:
    """A task's model with its initial weights, and the first samples to call it with."""

    def __init__(
        self,
        job: Job,
        layout: Layout,
        task: Task,
        sampled: Sampled,
        device: torch.device,
        turn: Turn | None = None,
        *,
        spread: Layout | None = None,
    ) -> None:
        """Build the model. `layout`: of the training to come. `turn`: the one of the task's turns to try, if any.

        `spread`: a layout of several processes that is to come besides.
        """
        self.job = job
        self.layout = layout
        self.spread = layout if spread is None else spread
        self.task = task
        self.sampled = sampled
        self.device = device
        self.dtype = torch.float32
        self.model = _build(job, task, device)
        # Leaf tensors in the model's plain attributes before the first forward, which may store inputs there.
        self.plain_leaves = {
            id(held): held for name, module in self.model.named_modules() for _, _, held in held_in(module, name)
        }
        self.loss_function = task.loss if turn is None else turn.loss  # what the user wrote
        self._loss = task_loss(task.loss, task.loss_weights) if turn is None else turn.task_loss()
        self.coupled = takes_gather(self.loss_function)
        self._coupling = Coupling(self._loss, None)
        self.turn = turn
        self.dropout: Dropout
        self._forward_context = ForwardContext()
        self._context: Callable[[], AbstractContextManager[Any]] = nullcontext
        # Entered in every forward and loss as the last mode: that of float64 answers torch.autograd.grad itself.
        self.listener: AbstractContextManager[Any] = nullcontext()
        self._prepare()

    def _prepare(self) -> None:
        """Prepare the model as a layout does before the first step: dropout by sample, batch norm over the batch."""
        if not self.job.recipe.dropout:
            switch_off(self.model)
        keep_no_cache(self.model)
        with said(MODEL, "the model"):
            move(self.model, self.device, self.dtype)
            self.dropout = same_dropout(
                self.model, self._forward_context, attention=self.job.recipe.attention_dropout
            )
            global_batch_norm(self.model, _everyone(), self._forward_context)
        self.model.train()
        self._buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}

    def widen(self) -> None:
        """Switch to float64, in which rounding can't be mistaken for an error."""
        self.model.zero_grad()
        self._restore_buffers()
        self.dtype = torch.float64
        move(self.model, self.device, self.dtype)
        self._buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        self._context = Precision("fp64", self.device).throughout

    def narrow(self) -> None:
        """Switch back to float32."""
        self.dtype = torch.float32
        move(self.model, self.device, self.dtype)
        self._buffers = {
            name: buffer.to(self.dtype if buffer.is_floating_point() else buffer.dtype)
            for name, buffer in self._buffers.items()
        }
        self._context = nullcontext

    @contextmanager
    def in_float32(self) -> Iterator[None]:
        """Switch to float32 within the block, as a training step is taken."""
        wide = self.dtype == torch.float64
        if wide:
            self.narrow()
        try:
            yield
        finally:
            if wide:
                self.widen()

    @property
    def tolerance(self) -> float:
        """The relative tolerance for rounding; coupled samples differ in their first digits.

        In float64 it allows for models that compute a part in float32, on purpose or in NumPy.
        """
        return 1e-6 if self.dtype == torch.float64 else 1e-4

    def output(self, first: int, last: int) -> tuple[Any, Batch]:
        """Run a training forward on samples `first` to `last - 1`; return its output and their batch."""
        batch = self.sampled.batch(first, last)
        batch = on_device(batch, self.device, self.dtype)
        numbers = torch.arange(first, last)
        self._restore_buffers()
        splits = splits_of(batch, last - first)
        moment = Moment(step=0, samples=numbers, zero_weight=False, seed=self.job.recipe.seed, splits=splits)
        with (
            said(FORWARD, f"the model's forward of samples {first} to {last - 1}"),
            self._forward_context.at(moment),
            self._context(),
            self.listener,
        ):
            inputs = batch.inputs if self.turn is None else InTurn(batch.inputs, self.turn.name)
            return call(self.model, inputs), batch

    def loss(self, first: int, last: int) -> tuple[Tensor, float]:
        """Return the loss summed over some samples (a 0-dim tensor), and its count."""
        output, batch = self.output(first, last)
        with (
            said(LOSS, f"the loss of samples {first} to {last - 1}", of=self.loss_function),
            self._context(),
            self.listener,
        ):
            if self.coupled:
                rows = CallRows(numbers=torch.arange(last - first))
                total, count = self._coupling.of_output(output, batch, rows)
            else:
                total, count = self._loss(output, batch)
            return total, float(count)

    def losses_of_parts(self, parts: Sequence[tuple[int, int]]) -> Iterator[tuple[Tensor, float]]:
        """Yield the losses of parts of the samples, as micro-batches of one step compute them."""
        if not self.coupled:
            yield from (self.loss(first, last) for first, last in parts)
            return
        outputs, batches = zip(*(self.output(first, last) for first, last in parts), strict=True)
        detached = [map_tensors(Tensor.detach, output) for output in outputs]
        rows = [CallRows(numbers=torch.arange(first, last)) for first, last in parts]
        with said(LOSS, "the loss of parts of the samples", of=self.loss_function), self._context(), self.listener:
            losses = self._coupling.of_parts(detached, batches, rows)
        for output, loss in zip(outputs, losses, strict=True):
            total, count = loss.of(output)
            yield total, float(count)

    @cached_property
    def without_graph(self) -> Callable[[], AbstractContextManager[Any]]:
        """Return the context for a forward without backward: no_grad(), unless the forward itself needs gradients."""
        try:
            with torch.no_grad():
                self.output(0, len(self.sampled))
        except ContractError:
            return nullcontext
        return torch.no_grad

    @contextmanager
    def of(self, sampled: Sampled) -> Iterator[None]:
        """Use other samples within the block."""
        before, self.sampled = self.sampled, sampled
        try:
            yield
        finally:
            self.sampled = before

    def elsewhere(self) -> tuple[Tensor, float] | None:
        """Switch to samples from all over the set, and return their loss and count; None if none of them counts."""
        first, self.sampled = self.sampled, take_others(self.task)
        loss = self.loss(0, len(self.sampled))
        if loss[1] > 0:
            return loss
        self.sampled = first
        return None

    def moved_generator(
        self, function: Callable[[], Any], outcome: Callable[[], Any], alike: Callable[[Any, Any], bool]
    ) -> str | None:
        """Call a function, and name the owner of the random generator that it draws from; None if from none.

        Python's and NumPy's are only named if the numbers matter: if `outcome`, of the same code, is not `alike` for
        other numbers.
        """
        before = generators.state(self.device)
        with generators.seedings_taken_back(self.device):
            function()
        return generators.that_matters(before, generators.state(self.device), outcome, alike)

    def loss_and_gradients(self, scale: float = 1.0) -> LossAndGradients:
        """`scale` times the loss of the samples, and the gradients of all parameters; what they have is kept.

        By a backward, so that every hook of a gradient is called.
        """
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        kept = [parameter.grad for parameter in trained]
        try:
            for parameter in trained:
                parameter.grad = None
            total = scale * self.loss(0, len(self.sampled))[0]
            total.backward()
            return total.detach(), tuple(parameter.grad for parameter in trained)
        finally:
            for parameter, gradient in zip(trained, kept, strict=True):
                parameter.grad = gradient

    def evaluate(self, batch: Batch) -> Any:
        """The model's output in evaluation mode."""
        batch = on_device(batch, self.device, self.dtype)
        self.model.eval()
        try:
            with torch.no_grad(), self._context():
                return call(self.model, batch.inputs), batch
        finally:
            self.model.train()

    def _restore_buffers(self) -> None:
        """Restore the initial buffers, since a forward may change them (running statistics, power iterations).

        Only those that have changed: a backward that is still to come may need the others, such as positions.
        """
        now = dict(self.model.named_buffers())
        with torch.no_grad():
            for name, value in self._buffers.items():
                if name in now and now[name].shape == value.shape and not torch.equal(now[name], value):
                    now[name].copy_(value)

    def without_batch_statistics(self) -> AbstractContextManager[None]:
        """Switch batch norms to running statistics: samestep synchronizes batch statistics under every layout."""
        return by_running_statistics(self.model)


def _everyone() -> dist.ProcessGroup:
    """Return the process group of this process alone, which batch norm needs."""
    assert dist.group.WORLD is not None  # of this process alone
    return dist.group.WORLD


def _build(job: Job, task: Task, device: torch.device) -> nn.Module:
    """Build the model under the recipe's seed. Raises ContractError if it draws from unseeded generators."""

    def others() -> generators.State:
        return tuple(generator for generator in generators.state(device) if generator[0] != "PyTorch's")

    before = others()
    with said(MODEL, "model()"), Budget():
        model = build_model(task, job.recipe).model

    def built_again() -> nn.Module:
        with said(MODEL, "model(), called again,"), Budget():
            return build_model(task, job.recipe).model

    who = generators.that_matters(before, others(), built_again, _alike)
    if who is not None:
        place = generators.line_that_draws(lambda: build_model(task, job.recipe), device, who)
        raise ContractError(
            MODEL,
            f"model() draws from {who} generator of random numbers, which has no seed here, so every rank would "
            "build another model; draw with PyTorch's functions" + at(place),
        )
    again = built_again()
    if again is model:
        raise ContractError(
            MODEL,
            f"model() gives the same {type(model).__name__} in each call, which training changes; build a new one in "
            f"each call{line_of(task.model)}",
        )
    name = _differs(model, again)
    if name is not None:
        raise ContractError(
            MODEL,
            f"model() gives another {name} in the second call under the same seed, so every rank would build another "
            f"model; draw with PyTorch's functions, without generators of your own{line_of(task.model)}",
        )
    return again  # the task may remember the last one


def _alike(first: nn.Module, second: nn.Module) -> bool:
    """Whether two models have the same modules, with the same parameters, buffers and plain attributes."""
    return str(first) == str(second) and _differs(first, second) is None and _attributes_alike(first, second)


def _attributes_alike(first: nn.Module, second: nn.Module) -> bool:
    """Whether the modules of two models have the same numbers, texts, tensors and functions as plain attributes."""
    modules = zip(first.modules(), second.modules(), strict=True)  # of the same names, as their texts are the same
    return all(_plain_alike(_plain(one), _plain(other)) for one, other in modules)


def _plain(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in REGISTRIES}


def _plain_alike(first: Any, second: Any) -> bool:
    """`equal`, and functions that are the same, also in lists and mappings."""
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return first.keys() == second.keys() and all(_plain_alike(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)):
        return len(first) == len(second) and all(map(_plain_alike, first, second))
    name = getattr(first, "__qualname__", None)
    return equal(first, second) and name == getattr(second, "__qualname__", None)


def _differs(first: nn.Module, second: nn.Module) -> str | None:
    """Return the first parameter or buffer whose values differ between two models; None if all are equal."""
    others = dict([*second.named_parameters(), *second.named_buffers()])
    for name, tensor in (*first.named_parameters(), *first.named_buffers()):
        if name not in others or not equal(tensor.detach(), others[name].detach()):
            return name
    return None


# Path, such as "blocks.0.more[1]"; type of its container, such as "a plain list"; the tensor.
Held = tuple[str, str, Tensor]

_DEPTH = 4  # of lists in lists


def held_in(owner: Any, path: str) -> Iterator[Held]:
    """Yield parameters and other leaf tensors that require gradients in an object's plain attributes."""
    for key, value in getattr(owner, "__dict__", {}).items():
        if key not in REGISTRIES:
            yield from _within(value, f"{path}.{key}" if path else key, "", 0)


def _within(value: Any, name: str, kind: str, depth: int) -> Iterator[Held]:
    """Yield the parameters in a value, or in nested lists and mappings, with their paths and containers."""
    if isinstance(value, Tensor):
        if isinstance(value, nn.Parameter) or (value.requires_grad and value.is_leaf):
            yield name, kind, value
    elif isinstance(value, nn.Module):
        for parameter in value.parameters():
            yield name, kind, parameter
    elif depth < _DEPTH and isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            yield from _within(inner, f"{name}[{index}]", f"a plain {type(value).__name__}", depth + 1)
    elif depth < _DEPTH and isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _within(inner, f"{name}[{key!r}]", f"a plain {type(value).__name__}", depth + 1)


class Writes(TorchDispatchMode):
    """Records the first operator that writes to the memory of a model's parameter, and its caller."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._names = {
            parameter.untyped_storage().data_ptr(): name
            for name, parameter in model.named_parameters()
            if parameter.numel()
        }
        self.written: str | None = None  # the parameter's name
        self.line: str | None = None  # "model.py:31", of the first caller that is not PyTorch's

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if self.written is None and schema(func).is_mutable:
            self._look(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _look(self, func: Any, args: Sequence[Any], keywords: Mapping[str, Any]) -> None:
        """Record the first parameter or buffer that an operator writes to, and the user's line that called it."""
        arguments = arguments_by_name(func, args, keywords)
        for argument in schema(func).arguments:
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            for tensor in pytree.tree_leaves(arguments.get(argument.name)):
                if isinstance(tensor, Tensor) and tensor.numel():
                    self.written = self.written or self._names.get(tensor.untyped_storage().data_ptr())
        if self.written is not None:
            frame = sys._getframe()
            while frame.f_back is not None and not is_foreign(frame.f_code.co_filename):
                frame = frame.f_back
            self.line = f"{frame.f_code.co_filename}:{frame.f_lineno}"
