"""A plan compared with the run that followed it: each term as planned and as measured, and the largest error."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from samestep.sizes import decimal_size

STEP = "step"
_FIRST = 3  # untypical first steps, which allocate buffers and optimizer state, or count bytes
_COMPUTE = ("products", "attention", "passes", "operators", "sharding")
_MESSAGES = ("messages", "bytes sent")
_HELD = ("parameters", "optimizer_state", "activations", "gathered_and_gradients")


@dataclass(frozen=True, kw_only=True)
class PlanTerm:
    """One number of a plan, and its measurement."""

    name: str
    planned: float
    measured: float
    unit: str  # "s" or "B"

    @property
    def error(self) -> float | None:
        """Relative error; None if the measurement is 0."""
        return self.planned / self.measured - 1 if self.measured else None


def terms(plan: Mapping[str, Any], report: Mapping[str, Any], step_seconds: Sequence[float]) -> list[PlanTerm]:
    """Return the terms of a plan (`Prediction.to_json`) and of its run (report.json, and the steps' seconds).

    First the whole step, then its parts: a rank's own computation, and the rest, which is messages and waiting; then
    the memory of the fullest rank, and the traffic of the rank that sends most.
    """
    late = step_seconds[_FIRST:] or step_seconds
    rows: list[PlanTerm] = []
    if late:
        step = median(late)
        parts = plan["seconds_by_cause"]
        owns = report.get("own_step_seconds") or [step]
        own = min(max(owns), step) if len(owns) > 1 else step  # one rank waits for no other
        rows = [
            PlanTerm(name=STEP, planned=plan["step_seconds"], measured=step, unit="s"),
            PlanTerm(
                name="computing", planned=sum(parts.get(cause, 0.0) for cause in _COMPUTE), measured=own, unit="s"
            ),
        ]
        if len(owns) > 1:
            sent = sum(parts.get(cause, 0.0) for cause in _MESSAGES)
            rows.append(PlanTerm(name="messages and waiting", planned=sent, measured=step - own, unit="s"))
    planned, held = plan["usage_bytes"], report.get("usage_bytes") or []
    if planned and held:
        for name in _HELD:
            most = [max(rank[name] for rank in ranks) for ranks in (planned, held)]
            rows.append(PlanTerm(name=name.replace("_", " "), planned=most[0], measured=most[1], unit="B"))
        sent = [max(sum(rank["sent"].values()) for rank in ranks) for ranks in (planned, held)]
        rows.append(PlanTerm(name="sent", planned=sent[0], measured=sent[1], unit="B"))
    return rows


def furthest(rows: Sequence[PlanTerm], unit: str) -> PlanTerm | None:
    """Return the part, in this unit, with the largest difference."""
    parts = [term for term in rows if term.unit == unit and term.name != STEP]
    return max(parts, key=lambda term: abs(term.planned - term.measured), default=None)


def lines_of(rows: Sequence[PlanTerm]) -> list[str]:
    """Compare a plan with its run: time, then memory; empty if nothing was measured."""
    lines = []
    for unit, what in (("s", "time of a step"), ("B", "bytes of a rank")):
        pairs = ", ".join(f"{term.name} {_shown(term)}" for term in rows if term.unit == unit)
        if pairs:
            lines.append(f"{what}, planned and measured: {pairs}")
    return lines


def _shown(term: PlanTerm) -> str:
    """Format a term as planned and as measured, with the relative error."""
    numbers = (term.planned, term.measured)
    both = " and ".join(f"{value:.3g} s" if term.unit == "s" else decimal_size(value) for value in numbers)
    return both + ("" if term.error is None else f" ({term.error:+.0%})")
