"""Results of pairs, and the file that they are kept in as they come."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

Verdict = Literal["same step", "refused", "NOT the same step", "crash", "time limit", "not made"]


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a model under a layout came to."""

    model: str
    kind: str
    layout: str
    verdict: Verdict
    reason: str = ""  # why it is not the same step
    difference: float | None = None  # the largest relative one
    seconds: float = 0.0
    prepared: float = 0.0  # seconds from the task to the end of its checks, before any step
    impossible: str | None = None  # why no such layout can exist for this model
    half: str = "chosen"  # the part of the table: chosen, drawn or library
    weight: float = 1.0  # how many types the model stands for

    @property
    def pair(self) -> tuple[str, str]:
        return self.model, self.layout

    @property
    def possible(self) -> bool:
        return self.verdict == "same step" or (self.impossible is None and self.verdict != "not made")

    @property
    def miss(self) -> bool:
        """Whether it should work, and does not; what is wrong or crashes is a miss even where it can't exist."""
        refused = self.verdict == "refused"
        return self.verdict not in ("same step", "not made") and not (refused and self.impossible is not None)


def read(file: Path) -> dict[tuple[str, str], Result]:
    """Results of a file by their pair; none where there is no file."""
    if not file.is_file():
        return {}
    found = [Result(**values) for values in json.loads(file.read_text(encoding="utf-8"))]
    return {result.pair: result for result in found}


def write(file: Path, results: Iterable[Result]) -> None:
    new = file.with_suffix(".new")
    new.write_text(json.dumps([asdict(each) for each in results], indent=1) + "\n", encoding="utf-8")
    new.replace(file)


def rate(results: Sequence[Result]) -> tuple[int, int]:
    """How many pairs take the same step, and how many could."""
    return sum(r.verdict == "same step" for r in results), sum(r.possible or r.miss for r in results)


def misses_by_reason(results: Iterable[Result]) -> list[tuple[str, Sequence[Result]]]:
    """Misses grouped by what is common to their reasons, the most frequent first."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        if result.miss:
            groups.setdefault(f"{result.verdict}: {common(result.reason)}", []).append(result)
    return sorted(groups.items(), key=lambda group: -len(group[1]))


def common(reason: str) -> str:
    """A reason without what differs between models: the layout, names of modules and numbers."""
    text = re.sub(r'layout "[^"]*": ', "", reason.strip())
    text = re.sub(r"\b[A-Za-z_]\w*(\.\w+)+\b", "M", text)
    text = re.sub(r"\b[A-Z]\w+[a-z][A-Z]\w*\b", "C", text)
    return re.sub(r"\d+", "N", text)[:160]


def counts(results: Iterable[Result]) -> Mapping[str, int]:
    return Counter(
        "impossible" if result.verdict == "refused" and not result.miss else result.verdict for result in results
    )
