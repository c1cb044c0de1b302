"""JobInfo: what ranks tell the process that started them about their job; it has started just some command."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from samestep.job import Run

_FILE = "about.json"  # in the round's folder


@dataclass(frozen=True, kw_only=True)
class JobInfo:
    """What a training's ranks say of it."""

    hang_limit: float | None  # seconds
    grace_period: float  # seconds that they need to save and end
    layout: str | None = None  # once the ranks have met
    run_folder: str | None = None


def about(run: Run) -> JobInfo:
    """What is known before the ranks have met."""
    return JobInfo(hang_limit=run.hang_limit, grace_period=run.grace_period)


def write(folder: Path, rank: int, said: JobInfo) -> None:
    """Leave it where `read` finds it, never half-written."""
    new = folder / f"about-{rank}.new"
    new.write_text(json.dumps(asdict(said)), encoding="utf-8")
    new.replace(folder / _FILE)


def read(folder: Path) -> JobInfo | None:
    """What this host's ranks have said; None where they have not, or are not samestep's."""
    try:
        return JobInfo(**json.loads((folder / _FILE).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
