"""Finds the first NaN or infinite value in the steps of a proof, and on which side it occurs."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

ONE_PROCESS = "one process"
BOTH = "both"


@dataclass(frozen=True, kw_only=True)
class NonFiniteValue:
    """The first value that is not finite on one side of a comparison, or on both."""

    side: str  # "one process", the layout, or "both"
    kind: str  # "NaN" or "infinite"
    what: str  # "loss", "gradient norm", "parameter" or "metric"
    step: int  # counted from 0; a parameter's and a metric's values are those after it
    name: str | None = None  # of the metric, of the parameter, or of the first parameter whose gradient is not finite

    def words(self) -> str:
        """A line such as "NaN: the gradient norm of step 0 (the gradient of 2.weight), in one process alone"."""
        of = {
            "loss": f"the loss of step {self.step}",
            "gradient norm": f"the gradient norm of step {self.step}",
            "parameter": f"the parameter {self.name} after step {self.step}",
            "metric": f"the metric {self.name} after step {self.step}",
        }[self.what]
        gradient = f" (the gradient of {self.name})" if self.what == "gradient norm" and self.name else ""
        where = {ONE_PROCESS: "in one process alone", BOTH: "in one process and under the layout"}
        return f"{self.kind}: {of}{gradient}, {where.get(self.side, f'under {self.side} alone')}"


def first_of_steps(
    side: str, losses: Sequence[float], grad_norms: Sequence[float], gradient: str | None
) -> NonFiniteValue | None:
    """The first loss or gradient norm that is not finite; `gradient` is the parameter that `watched` found."""
    for step, (loss, norm) in enumerate(zip(losses, grad_norms, strict=True)):
        for what, value in (("loss", loss), ("gradient norm", norm)):
            if not math.isfinite(value):
                name = gradient if what == "gradient norm" else None
                return NonFiniteValue(side=side, kind=_kind(value), what=what, step=step, name=name)
    return None


def first_parameter(side: str, step: int, parameters: Mapping[str, Tensor]) -> NonFiniteValue | None:
    """The first parameter with a value that is not finite after a step."""
    for name, value in parameters.items():
        if not torch.isfinite(value).all():
            kind = "NaN" if value.isnan().any() else "infinite"
            return NonFiniteValue(side=side, kind=kind, what="parameter", step=step, name=name)
    return None


def first_metric(layout: str, step: int, own: Any, others: Any, path: str = "") -> NonFiniteValue | None:
    """The first metric that is finite on one side and not on the other.

    A metric that is finite on neither side is undefined for these samples, such as the recall of a class without any.
    """
    if isinstance(own, Mapping) and isinstance(others, Mapping):
        pairs = [(f"{path}.{key}" if path else str(key), own[key], others[key]) for key in own if key in others]
    elif isinstance(own, (list, tuple)) and isinstance(others, (list, tuple)):
        pairs = [(f"{path}[{n}]", a, b) for n, (a, b) in enumerate(zip(own, others, strict=False))]
    elif isinstance(own, (int, float)) and isinstance(others, (int, float)):
        if math.isfinite(own) == math.isfinite(others):
            return None
        side, value = (ONE_PROCESS, others) if math.isfinite(own) else (layout, own)
        return NonFiniteValue(side=side, kind=_kind(value), what="metric", step=step, name=path)
    else:
        return None
    values = (first_metric(layout, step, a, b, name) for name, a, b in pairs)
    return next((value for value in values if value is not None), None)


def of_sides(alone: NonFiniteValue | None, split: NonFiniteValue | None) -> tuple[NonFiniteValue, ...]:
    """The first values of one process and of a layout, merged if they are of the same quantity and step."""
    if alone is not None and split is not None and (alone.what, alone.step) == (split.what, split.step):
        return (replace(alone, side=BOTH),)
    return tuple(value for value in (alone, split) if value is not None)


@contextmanager
def watched(model: nn.Module | None) -> Iterator[list[str]]:
    """Watch for gradients that are not finite; yields a list that gets the name of the first such parameter.

    Backward order makes it the one nearest to the loss. Sharded parameters have no hook on their gradients, and are
    not watched.
    """
    names: list[str] = []

    def watch(name: str) -> Any:
        """Make a hook that records parameter `name` if its gradient is the first that isn't finite."""

        def note(parameter: Tensor) -> None:
            gradient = parameter.grad
            if not names and gradient is not None and not torch.isfinite(gradient).all():
                names.append(name)

        return note

    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad] if model is not None else []
    handles = [parameter.register_post_accumulate_grad_hook(watch(name)) for name, parameter in trained]
    try:
        yield names
    finally:
        for handle in handles:
            handle.remove()


def _kind(value: float) -> str:
    return "NaN" if math.isnan(value) else "infinite"
