"""The matrix: many jobs under many layouts, each compared with one process."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from samestep.errors import UserError
from samestep.layout import Layout
from samestep.verification.proof import Proof

# Every axis alone but that of experts (`EXPERTS`), every schedule, and their hybrids up to eight ranks.
ALL = (
    "dp2",
    "dp3",
    "zero1x2",
    "zero2x2",
    "fsdp2",
    "dp2 fsdp2",
    "fsdp2 recompute=full",
    "tp2",
    "tp2 sequence=split",
    "tp4",
    "pp2 schedule=gpipe",
    "pp2 schedule=1f1b",
    "pp2 stages=2 schedule=interleaved-1f1b",
    "pp2 stages=2 schedule=interleaved-zero-bubble",
    "pp2 stages=2 schedule=zbv-zero-bubble",
    "pp4",
    "cp2",
    "cp2 attention=ring",
    "dp2 tp2",
    "fsdp2 tp2",
    "dp2 pp2",
    "fsdp2 cp2",
    "dp2 cp2 attention=ring",
    "pp2 tp2",
    "pp2 dp2 tp2",
    "pp2 fsdp2 tp2",
)

# Every axis once but that of experts, and two hybrids.
FAST = ("dp2", "zero1x2", "fsdp2", "tp2", "pp2", "cp2", "fsdp2 tp2", "pp2 tp2")

# For mixtures of experts: every axis once, and the expert axis alone and with each other axis.
EXPERTS = (
    "dp2",
    "fsdp2",
    "tp2",
    "pp2",
    "cp2",
    "ep2",
    "ep2 recompute=full",
    "ep4",
    "dp2 ep2",
    "zero1x2 ep2",
    "zero2x2 ep2",
    "fsdp2 ep2",
    "ep2 tp2",
    "pp2 ep2",
    "ep2 cp2",
)

_SETS = {"all": ALL, "fast": FAST, "experts": EXPERTS}


@dataclass(frozen=True, kw_only=True)
class MatrixRow:
    """One job under one layout: its proof, why the layout was refused, or how it failed."""

    job: str
    layout: str
    proof: Proof | None = None
    reason: str | None = None  # why the layout was refused
    failure: str | None = None  # what went wrong in the ranks
    seconds: float | None = None  # of the proof, without the start of its ranks

    @property
    def passed(self) -> bool:
        """Whether the step was the same, or the layout was refused."""
        return self.reason is not None or (self.proof is not None and self.proof.same_step)

    @property
    def verdict(self) -> str:
        """A word or two: same, NOT same, can't tell, refused, failed, or a kind of value that is not finite."""
        if self.proof is None:
            return "refused" if self.failure is None else "failed"
        if self.proof.nonfinite:
            return self.proof.nonfinite[0].kind
        if self.proof.undecided:
            return "can't tell"
        return "same" if self.proof.same_step else "NOT same"

    @property
    def words(self) -> Sequence[str]:
        """Reasons for the verdict beyond the differences."""
        why = self.reason or self.failure
        if why or self.proof is None or self.proof.same_step:
            return [why] if why else []
        departure = self.proof.departure
        first = [] if departure is None else [f"{self.layout}, first difference: {departure.line}"]
        return [*first, *self.proof.words()]

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "proof": self.proof and self.proof.to_json(), "verdict": self.verdict}


def layouts_of(text: str) -> Sequence[str]:
    """The layouts of a set (all, fast, experts), or of a list such as "dp2, fsdp2 tp2".

    Raises LayoutError for a wrong one.
    """
    if text.strip() in _SETS:
        return _SETS[text.strip()]
    layouts = [part.strip() for part in text.split(",") if part.strip()]
    if not layouts:
        raise UserError(f'--layouts "{text}" names no layout; use {", ".join(_SETS)} or "dp2, fsdp2 tp2"')
    for layout in layouts:
        Layout.parse(layout)
    return layouts
