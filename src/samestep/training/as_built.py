"""The model as its task built it: forward and backward of the first batch, by PyTorch alone.

A proof compares layouts with one process, and both run samestep's engine. A fault that both share, such as a part of
a parameter that is lost when the model is moved, would show on neither side. So the first step of the one process is
compared with this one, which shares nothing with the engine: no other dtype, nothing spread.
"""

import math
import random
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from samestep.data.order import SampleOrder
from samestep.data.sample_draws import SeededSamples
from samestep.data.types import Batch, Samples
from samestep.parallel.complex_parameters import as_real
from samestep.parallel.deferred_init import tied_stay_tied
from samestep.parallel.exact.float64 import in_float64
from samestep.parallel.exact.generators import seedings_taken_back
from samestep.recipe import Recipe
from samestep.tasks.base import Task, call
from samestep.tasks.losses import task_loss
from samestep.tasks.turns import turns_of
from samestep.torch_internals import pytree
from samestep.torch_internals.operators import TorchDispatchMode
from samestep.training.adapters import put_adapters
from samestep.training.evaluation import switch_off
from samestep.training.last_bits import LastBitsChanged
from samestep.training.rounding import relative, relative_tensors

# Relative difference of float32 from float64. Of tiny new models of 37 types of transformers, none exceeded 2e-6.
TOLERANCE = 1e-4

# A model may amplify rounding more than that. Perturbing its parameters by their rounding measures how much; those 37
# differed from float64 by a third to three times the effect of such a perturbation.
_TIMES_NUDGED = 100

# Perturbed parameters move all samples alike, which batch norms subtract again, so the rounding of their own forward
# is not measured. Above the tolerance, the step is taken again with the last bits of every rounded result changed.
_TIMES_ROUNDED = 20

# A tolerance of a tenth of the gradient or more would find no fault, so nothing is compared then.
_BLUNT = 0.1

# A gradient below this share of the largest one may be rounding alone, such as that of attention's key biases.
_SMALL = 1e-3


@dataclass(frozen=True, kw_only=True)
class FirstStep:
    """Loss, gradient norm and gradients of the first batch, before clipping."""

    loss: float
    grad_norm: float
    gradients: Mapping[str, Tensor]  # by name, of parameters that have one


@dataclass(frozen=True, kw_only=True)
class AsBuilt:
    """Difference between the first step of one process, in float64, and that of the model as built."""

    max_relative_difference: Mapping[str, float]  # of loss, grad_norm and gradients; empty if not compared
    tolerance: float = TOLERANCE
    worst_parameter: str | None = None
    not_compared: str | None = None  # the reason

    @property
    def same(self) -> bool:
        """Whether all differences are below the tolerance; True if nothing was compared."""
        return all(value < self.tolerance for value in self.max_relative_difference.values())

    def words(self) -> str:
        """Describe the result in one line."""
        if self.not_compared is not None:
            return f"not compared with the model as it was built: {self.not_compared}"
        largest = max(self.max_relative_difference.values())
        measured = f"{largest:.2e}; tolerance {self.tolerance:.0e}"
        if self.same:
            return f"one process takes the first step of the model as it was built ({measured})"
        name = max(self.max_relative_difference, key=lambda name: self.max_relative_difference[name])
        where = {"loss": "the loss", "grad_norm": "the gradient's norm"}.get(
            name, f"the gradient of {self.worst_parameter}"
        )
        return f"one process does NOT take the first step of the model as it was built: {where} differs ({measured})"


def hold_as_built(
    recipe: Recipe, task: Task, samples: Samples, device: torch.device, reference: FirstStep
) -> AsBuilt:
    """Compare the reference's first step with one of the task's model by plain PyTorch on the same samples."""
    if turns_of(task):
        return _not_compared("its steps are taken in turns")
    if recipe.dropout:
        return _not_compared("dropout drops other elements there")
    if not math.isfinite(reference.loss) or not math.isfinite(reference.grad_norm):
        return _not_compared("the loss or the gradient's norm is not finite")
    devices = [] if device.type == "cpu" else [device]
    watch = _LowPrecision()
    # Warnings of the user's code were shown when the reference ran.
    with torch.random.fork_rng(devices=devices, device_type=device.type), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model, batch = _built(recipe, task, samples, device)
            if any(is_lazy(parameter) for parameter in model.parameters()):
                return _not_compared("its parameters get their shapes in the first forward")
            before = _generators(device)
            buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
            with watch, seedings_taken_back(device):
                built = _first_step(model, task, batch)
            if _generators(device) != before:
                return _not_compared("its forward draws random numbers")
            # A forward may update buffers, such as the vectors of spectral norm; the second step needs the old ones.
            _restore(model, buffers)
            differences, worst = _differences(reference, built)
            tolerance, why = _tolerance(model, task, batch, buffers, built, max(differences.values()))
            if not max(differences.values()) < tolerance < _BLUNT and max(differences.values()) < math.inf:
                model, batch = _built(recipe, task, samples, device)
                if exact := _without_rounding(model, task, batch, reference):
                    differences, worst, tolerance, why = exact
        except (RuntimeError, ValueError, TypeError, IndexError) as error:  # such as an unsupported size
            reason = str(error).strip().partition("\n")[0]
            return _not_compared(f"plain PyTorch fails with {type(error).__name__}: {reason}")
    if not math.isfinite(built.loss) or not math.isfinite(built.grad_norm):
        return _not_compared("in its own dtype the loss or the gradient's norm is not finite")
    if watch.found:
        return _not_compared(f"it computes in {', '.join(sorted(watch.found))}, which float64 does not round to")
    if not tolerance < _BLUNT:
        return _not_compared(f"{why}, which would hide any fault")
    return AsBuilt(
        max_relative_difference=differences,
        tolerance=tolerance,
        worst_parameter=worst,
    )


def _tolerance(
    model: nn.Module, task: Task, batch: Batch, buffers: Mapping[str, Tensor], built: FirstStep, apart: float
) -> tuple[float, str]:
    """The tolerance of a model, whose step as built has the largest difference `apart`, and what it follows from.

    `model` has the buffers of before its first step. Its parameters are changed.
    """
    nudged = _first_step(_nudged(model), task, batch)
    effect = max(_differences(nudged, built)[0].values())
    tolerance = max(TOLERANCE, _TIMES_NUDGED * effect)
    why = f"to move its parameters by float32's rounding moves its step by {effect:.0e}"
    if not tolerance <= apart < math.inf:
        return tolerance, why
    _restore(model, buffers)
    with LastBitsChanged():
        rounded = _first_step(model, task, batch)
    effect = max(_differences(rounded, nudged)[0].values())
    if _TIMES_ROUNDED * effect <= tolerance:
        return tolerance, why
    return _TIMES_ROUNDED * effect, f"to change the last bit of all that it rounds moves its step by {effect:.0e}"


def _without_rounding(
    model: nn.Module, task: Task, batch: Batch, reference: FirstStep
) -> tuple[dict[str, float], str | None, float, str] | None:
    """The differences from a step of the model as built whose forward is in float64; None if it can't be.

    Gradients jump where the forward has a kink: a ReLU's input may be 1e-8 in float64 and, rounded, -1e-8. No
    perturbation measures that, since another one crosses other kinks. Returned with the tolerance and its reason: a
    chain of batch norms may amplify even float64's rounding, in gradients that would be zero without it.
    """
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        built = _first_step(model, task, batch, forward_in=in_float64(promoting=True))
        differences, worst = _differences(reference, built)
        if not TOLERANCE <= max(differences.values()) < math.inf:
            return differences, worst, TOLERANCE, ""
        _restore(model, before)
        with LastBitsChanged():
            rounded = _first_step(model, task, batch, forward_in=in_float64(promoting=True))
    except (RuntimeError, ValueError, TypeError, IndexError):  # of an operator that has no float64, for example
        return None
    effect = max(_differences(rounded, built)[0].values())
    why = f"to change the last bit of all that it rounds in float64 moves its step by {effect:.0e}"
    return differences, worst, max(TOLERANCE, _TIMES_ROUNDED * effect), why


def _not_compared(reason: str) -> AsBuilt:
    return AsBuilt(max_relative_difference={}, not_compared=reason)


def _built(recipe: Recipe, task: Task, samples: Samples, device: torch.device) -> tuple[nn.Module, Batch]:
    """Build the task's model under the recipe's seed, without dropout, and collate the first global batch."""
    model = built_model(recipe, task, device)
    order = SampleOrder(size=len(samples), batch=recipe.batch, seed=recipe.seed)
    inputs, targets = task.collate(SeededSamples(samples, recipe.seed).read(order.global_batch(0).tolist()))
    return model, Batch(_on(inputs, device), _on(targets, device))


def built_model(recipe: Recipe, task: Task, device: torch.device) -> nn.Module:
    """Build the task's model under the recipe's seed, without dropout, in its own dtype."""
    torch.manual_seed(recipe.seed)
    model = task.model()
    if recipe.adapter is not None:
        put_adapters(model, recipe.adapter)
    switch_off(model)
    with tied_stay_tied(device):
        return model.to(device).train()


def _on(nest: Any, device: torch.device) -> Any:
    """Move the tensors of a nest to a device."""
    # Tokenizers return their own mapping types, which are leaves for PyTorch's pytree.
    nest = dict(nest) if isinstance(nest, Mapping) else nest
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), nest)


def _first_step(
    model: nn.Module, task: Task, batch: Batch, forward_in: AbstractContextManager[Any] | None = None
) -> FirstStep:
    """Compute loss, gradients and gradient norm of one batch by PyTorch alone."""
    model.zero_grad()
    loss_of = task_loss(task.loss, task.loss_weights).of_whole_batch
    with forward_in or nullcontext():
        total, count = loss_of(call(model, batch.inputs), batch)
        loss = total / count
    loss.backward()
    gradients = {
        name: dense(parameter.grad) for name, parameter in model.named_parameters() if parameter.grad is not None
    }
    squares = sum(as_real(gradient).double().square().sum().item() for gradient in gradients.values())
    return FirstStep(loss=loss.item(), grad_norm=math.sqrt(squares), gradients=gradients)


def dense(gradient: Tensor) -> Tensor:
    """A dense copy of a gradient."""
    return gradient.detach().to_dense() if gradient.is_sparse else gradient.detach().clone()


def _restore(model: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    """Restore a model's buffers in place, except those whose shape has changed."""
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name in buffers and buffers[name].shape == buffer.shape:
                buffer.copy_(buffers[name])


def _nudged(model: nn.Module) -> nn.Module:
    """Perturb the model's parameters in place by a random relative error of up to eps of their dtype.

    Integral values are moved away from zero, so that truncating them gives the same, such as the signs on the
    diagonal of an orthogonal parametrization.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = 2 * torch.rand(parameter.shape, generator=generator, dtype=torch.float64) - 1
            noise = torch.where(_is_whole(parameter).cpu(), noise.abs(), noise)
            factor = 1 + torch.finfo(parameter.dtype).eps * noise.to(parameter.device)
            parameter.copy_(parameter.to(torch.promote_types(parameter.dtype, torch.float64)) * factor)
    return model


def _is_whole(tensor: Tensor) -> Tensor:
    """Elementwise, whether a real tensor's values are integral; all False for complex tensors."""
    return torch.zeros_like(tensor, dtype=torch.bool) if tensor.is_complex() else tensor == tensor.trunc()


def _differences(step: FirstStep, built: FirstStep) -> tuple[dict[str, float], str | None]:
    """Relative differences of loss, gradient norm and gradients, and the parameter whose gradient differs most."""
    largest = max((as_real(gradient).abs().max().item() for gradient in built.gradients.values()), default=0.0)
    worst, where = 0.0, None
    for name in {**built.gradients, **step.gradients}:
        apart = _apart(step.gradients.get(name), built.gradients.get(name), _SMALL * largest)
        if apart > worst or where is None:
            worst, where = apart, name
    differences = {
        "loss": relative(step.loss, built.loss),
        "grad_norm": relative(step.grad_norm, built.grad_norm),
        "gradients": worst,
    }
    return differences, where


def _apart(own: Tensor | None, built: Tensor | None, floor: float) -> float:
    """max|own - built| / max(max|built|, floor); a missing gradient counts as zeros."""
    if own is None or built is None:
        some = built if own is None else own
        return 0.0 if some is None or not some.any() else math.inf
    return relative_tensors(as_real(own).double(), as_real(built).double(), floor)


def _generators(device: torch.device) -> Sequence[Any]:
    """The states of all random number generators that a forward may draw from."""
    kind, keys, *rest = np.random.get_state()
    states: list[Any] = [torch.get_rng_state().tolist(), random.getstate(), kind, np.asarray(keys).tolist(), rest]
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state(device).tolist())
    return states


class _LowPrecision(TorchDispatchMode):
    """Records the 16-bit dtypes in which a forward or backward computes results."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.dtype in (torch.bfloat16, torch.float16):
                self.found.add(str(tensor.dtype).removeprefix("torch."))
        return result
