"""Leaves out what no optimizer's step used: forwards without a backward, and gradients that were set to zero."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SKIPPED = "skipped"  # a step's forwards that it did not use


@dataclass(frozen=True, kw_only=True)
class _Kept:
    forwards: list[bool]
    losses: list[bool]


def without_skipped(steps: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Steps with the forwards and losses that they used; the other forwards stand in `skipped`.

    A forward is unused if no backward reached its results, or if its gradients were set to zero before the step.
    Where every step does so with as many, gradients of micro-batches are lost, and nothing was skipped.
    """
    zeroed = {sum(bool(forward.get("zeroed")) for forward in step["forwards"]) for step in steps}
    return [_without(step, zeroed=len(zeroed) > 1) for step in steps]


def _without(step: Mapping[str, Any], *, zeroed: bool) -> Mapping[str, Any]:
    def is_kept(event: Mapping[str, Any]) -> bool:
        return event.get("used", True) and not (zeroed and event.get("zeroed"))

    kept = _Kept(forwards=[is_kept(event) for event in step["forwards"]], losses=[*map(is_kept, step["losses"])])
    if all(kept.forwards) or not any(kept.forwards):
        return step
    return {
        **step,
        "forwards": _those(step["forwards"], kept.forwards),
        "losses": [_at(event, kept.forwards) for event in _those(step["losses"], kept.losses)],
        "clips": [_at(clip, kept.losses) for clip in step["clips"]],
        SKIPPED: [forward for forward, used in zip(step["forwards"], kept.forwards, strict=True) if not used],
    }


def _those(values: Sequence[Any], kept: Sequence[bool]) -> list[Any]:
    return [value for value, used in zip(values, kept, strict=True) if used]


def _at(event: Mapping[str, Any], kept: Sequence[bool]) -> Mapping[str, Any]:
    """The event with its place among what is kept."""
    return {**event, "after": sum(kept[: event["after"]])}
