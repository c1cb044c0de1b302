"""Why a run of a method ended without a result: what it was refused for, or the error that it failed with."""

from pathlib import Path
from typing import Literal

from samestep.comparison.process import Outcome
from samestep.handwritten import FAILED, REFUSED

_PREFIX = "samestep: "  # of what the command line says last
_LINES = 3


def explain(folder: Path, outcome: Outcome, limit: float) -> tuple[Literal["refused", "failed"], str]:
    """Whether the job was refused or the run failed, and the message."""
    if outcome.code is None:
        return "failed", f"it ran longer than the time limit of {limit:g} s and was stopped"
    if (folder / REFUSED).is_file():
        return "refused", (folder / REFUSED).read_text(encoding="utf-8")
    if outcome.code == 2 and _PREFIX in outcome.output:
        return "refused", outcome.output.rpartition(_PREFIX)[2].strip()
    # Of a handwritten rank that failed; its launcher's own words stand behind it in what was printed.
    first = min(folder.glob(f"{FAILED}*"), key=lambda file: file.stat().st_mtime, default=None)
    text = first.read_text(encoding="utf-8") if first is not None else outcome.output
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return "failed", "\n".join(lines[-_LINES:]) or f"it ended with exit code {outcome.code} and said nothing"
