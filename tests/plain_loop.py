"""Training as a textbook has it: one process, the whole batch at once, float64, nothing of samestep's engine.

Only the order of the samples is samestep's; test_order.py holds that.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import samestep
from samestep.data.order import SampleOrder


@dataclass(kw_only=True)
class Trained:
    """What each step had, and the weights after the last one."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)  # before clipping
    rates: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


def train(
    recipe: samestep.Recipe,
    task: samestep.Task,
    *,
    left_out: Collection[int] = (),
    mean_loss: Callable[[Any, Any], Tensor] | None = None,
) -> Trained:
    """Train a task; the weights take no notice of the steps left out.

    `mean_loss`, of the model's output and the batch's targets, stands in for the loss of the task itself. Nothing is
    dropped where the recipe says so.
    """
    trained = Trained()
    torch.manual_seed(recipe.seed)
    model = task.model().double()
    if not recipe.dropout:
        _keep_all(model)
    parameters = list(model.parameters())
    samples = task.train_set()
    steps = recipe.steps or math.ceil(len(samples) / recipe.batch) * (recipe.epochs or 1)
    order = SampleOrder(size=len(samples), batch=recipe.batch, seed=recipe.seed)
    moments = [[torch.zeros_like(p), torch.zeros_like(p)] for p in parameters]
    for step in range(steps):
        inputs, targets = task.collate([samples[index] for index in order.global_batch(step).tolist()])
        batch = samestep.Batch(_double(inputs), targets)
        output = _called(model, batch.inputs)
        if mean_loss is None:
            total, count = task.loss(output, batch)
            loss = total / count
        else:
            loss = mean_loss(output, targets)
        model.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(parameters, recipe.clip or math.inf)
        assert isinstance(recipe.optimizer, samestep.AdamW | samestep.SGD)
        lr = recipe.optimizer.lr * rate(recipe.schedule, step, steps)
        with torch.no_grad():
            for parameter, state in zip(parameters, moments, strict=True) if step not in left_out else ():
                _update(recipe.optimizer, parameter, state, lr, step)
        trained.losses.append(loss.item())
        trained.grad_norms.append(norm.item())
        trained.rates.append(lr)
    trained.weights = {name: value.detach() for name, value in model.state_dict().items()}
    return trained


def _called(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def _double(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _double(each) for name, each in value.items()}
    if isinstance(value, tuple):
        return tuple(_double(each) for each in value)
    return value.double() if value.is_floating_point() else value


def _keep_all(model: nn.Module) -> None:
    """In evaluation mode nothing is dropped; batch norm goes on as in training."""
    for module in model.eval().modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.train()


def rate(schedule: samestep.Schedule, step: int, steps: int) -> float:
    warmup = int(schedule.warmup if schedule.warmup >= 1 else schedule.warmup * steps)
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / (steps - warmup)
    shape = {"none": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[schedule.decay]
    return schedule.final + (1 - schedule.final) * shape


def _decay(spec: samestep.AdamW | samestep.SGD, parameter: Tensor) -> float:
    return spec.weight_decay if spec.decay_all or parameter.ndim >= 2 else 0.0


def _update(
    spec: samestep.AdamW | samestep.SGD, parameter: nn.Parameter, moments: Sequence[Tensor], lr: float, step: int
) -> None:
    assert parameter.grad is not None
    if isinstance(spec, samestep.AdamW):
        _adamw(spec, parameter, parameter.grad, moments, lr, step)
    else:
        _sgd(spec, parameter, parameter.grad, moments[0], lr)


def _adamw(
    spec: samestep.AdamW, parameter: Tensor, gradient: Tensor, moments: Sequence[Tensor], lr: float, step: int
) -> None:
    first, second = moments
    first.mul_(spec.betas[0]).add_((1 - spec.betas[0]) * gradient)
    second.mul_(spec.betas[1]).add_((1 - spec.betas[1]) * gradient**2)
    direction = first / (1 - spec.betas[0] ** (step + 1))
    size = (second / (1 - spec.betas[1] ** (step + 1))).sqrt()
    parameter.sub_(lr * _decay(spec, parameter) * parameter + lr * direction / (size + spec.eps))


def _sgd(spec: samestep.SGD, parameter: Tensor, gradient: Tensor, velocity: Tensor, lr: float) -> None:
    gradient = gradient + _decay(spec, parameter) * parameter
    velocity.mul_(spec.momentum).add_(gradient)
    parameter.sub_(lr * (gradient + spec.momentum * velocity if spec.nesterov else velocity))
