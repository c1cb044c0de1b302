"""Optimizers and learning-rate schedules from a recipe."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from samestep.recipe import SGD, AdamW, Schedule


def make_optimizer(spec: AdamW | SGD, groups: Sequence[dict[str, Any]]) -> Optimizer:
    """AdamW or SGD over groups of parameters, fused where PyTorch has a fused one for them."""
    make = _MAKERS[type(spec)](spec)
    given = [parameter for group in groups for parameter in group["params"]]
    sharded = any(isinstance(parameter, DTensor) for parameter in given)
    if (sharded and type(spec) not in _FUSED_ON_SHARDS) or any(parameter.is_complex() for parameter in given):
        return make(groups)
    try:
        return make(groups, fused=True)
    except RuntimeError:  # no fused kernel for this device or dtype
        return make(groups)


def _adamw(spec: AdamW) -> Callable[..., Optimizer]:
    return partial(torch.optim.AdamW, lr=spec.lr, betas=spec.betas, eps=spec.eps)


def _sgd(spec: SGD) -> Callable[..., Optimizer]:
    return partial(torch.optim.SGD, lr=spec.lr, momentum=spec.momentum, nesterov=spec.nesterov)


_MAKERS: dict[type, Callable[[Any], Callable[..., Optimizer]]] = {AdamW: _adamw, SGD: _sgd}

# Of the others PyTorch's fused kernel does not know shards of parameters, which shows only when it is called.
_FUSED_ON_SHARDS = {AdamW}


def of_one_kind(group: dict[str, Any]) -> list[dict[str, Any]]:
    """Shards apart from what a sharded model keeps whole: PyTorch's fused kernels don't take both at once."""
    shards = [p for p in group["params"] if isinstance(p, DTensor)]
    whole = [p for p in group["params"] if not isinstance(p, DTensor)]
    return [{**group, "params": shards}, {**group, "params": whole}]


SCHEDULE = "schedule"  # of a group of parameters that has its own


def make_schedule(spec: Schedule, total_steps: int, optimizer: Optimizer) -> LambdaLR:
    """The learning rate of each step: step `s` of warm-up W has (s + 1) / W of it, so that no step is lost."""
    return LambdaLR(
        optimizer, [partial(rate, group.get(SCHEDULE) or spec, total_steps) for group in optimizer.param_groups]
    )


def rate(spec: Schedule, total_steps: int, step: int) -> float:
    """The fraction of the full learning rate at a step, counted from 0."""
    warmup = int(spec.warmup if spec.warmup >= 1 else spec.warmup * total_steps)
    if step < warmup:
        return (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    return spec.final + (1 - spec.final) * _DECAYS[spec.decay](done)


_DECAYS: dict[str, Callable[[float], float]] = {
    "none": lambda done: 1.0,
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),
}
